"""Life of a worker process, with a real coordinator."""

import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ayni.channels import open_sync_channel
from ayni.process import exit_code_of
from tests.support.agents import TOY, agent, module
from tests.support.coordinator import TOKEN, CoordinatorProcess, coordinator, environment
from worker_agent.agent import Agent
from worker_agent.config import WorkerConfig

RUN: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": 4,
    "min_workers": 2,
    "task": {"name": TOY, "options": {"dropout": 0.25}},
    "batch": {"samples": 10, "microbatches": 5, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05},
    "evaluation": {"every_steps": 2},
    "timeouts": {"shutdown": "10s"},
}
LONG = {**RUN, "num_steps": 1_000_000, "evaluation": {"every_steps": 0}}


def test_two_agents_train_a_run_to_its_end(tmp_path: Path):
    with coordinator(tmp_path, RUN) as server, agent(server.address, "ant", tmp_path) as ant:
        ant.wait_for_log("waiting for 1 more worker")
        with open_sync_channel(ant.address(), TOKEN) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service="ayni.v1.WorkerService"), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with agent(server.address, "bee", tmp_path, "--log-format", "json") as bee:
            assert (ant.end(), bee.end()) == (0, 0)
            assert server.process.wait(30) == 0
    for worker in (ant, bee):
        steps = [(line["kind"], line["step"]) for line in worker.metrics()]
        assert steps == [("train", 0), ("train", 1), ("evaluate", 2), ("train", 2), ("train", 3), ("evaluate", 4)]
    assert [line["loss"] for line in ant.metrics()] == [line["loss"] for line in bee.metrics()]
    assert "step 4 of 4: loss" in ant.read_log()
    assert "left the run after 4 steps" in ant.read_log()
    lines = [json.loads(line) for line in bee.read_log().splitlines()]
    assert {line["worker"] for line in lines} == {"bee"}
    [last] = [line for line in lines if line["message"].startswith("evaluation after 4 steps: loss")]
    assert (last["rank"], last["epoch"], last["step"]) == (1, 1, 4)
    assert {path.name for path in (ant.folder / "checkpoints").iterdir()} == {"best", "last"}
    assert not (bee.folder / "checkpoints").exists()
    assert "worker ant left: the run is over" in server.read_log()
    assert "differ" not in server.read_log()


def test_an_interrupted_agent_leaves_and_says_why_and_the_others_go_on(tmp_path: Path):
    run = {**LONG, "start_workers": 2, "min_workers": 1}
    with (
        coordinator(tmp_path, run) as server,
        agent(server.address, "ant", tmp_path) as ant,
        agent(server.address, "bee", tmp_path) as bee,
    ):
        bee.wait_for_log("step 3 of")
        bee.process.send_signal(signal.SIGTERM)
        assert bee.end() == 1
        assert "interrupted (SIGTERM)" in bee.read_log()
        assert "Traceback" not in bee.read_log()
        server.wait_for_log("worker bee left: interrupted (SIGTERM)")
        ant.wait_for_log("samples, 1 worker")
        server.process.send_signal(signal.SIGINT)
        assert ant.end() == 1
        assert "the coordinator was interrupted" in ant.read_log()
        assert "Traceback" not in ant.read_log()
        server.wait_for_log("worker ant left: ")


def test_a_second_signal_ends_an_agent_at_once(tmp_path: Path):
    with coordinator(tmp_path, RUN) as server, agent(server.address, "ant", tmp_path) as ant:
        ant.wait_for_log("waiting for 1 more worker")
        server.process.send_signal(signal.SIGSTOP)
        try:
            ant.process.send_signal(signal.SIGINT)
            ant.wait_for_log("SIGINT: stopping; again to exit at once")
            assert ant.process.poll() is None
            began = time.monotonic()
            ant.process.send_signal(signal.SIGINT)
            assert ant.end() == 1
            assert time.monotonic() - began < 2
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_an_agent_whose_coordinator_is_killed_may_be_started_again(tmp_path: Path):
    with (
        coordinator(tmp_path, {**LONG, "min_workers": 1}) as server,
        agent(server.address, "ant", tmp_path, "--rejoin-timeout", "2s") as ant,
    ):
        ant.wait_for_log("step 3 of")
        server.process.kill()
        assert ant.end() == 75
        assert f"the coordinator at {server.address} is gone" in ant.read_log()
        assert "could not come back within 2 s" in ant.read_log().splitlines()[-1]
        assert "Traceback" not in ant.read_log()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_coordinator_that_does_not_answer_is_given_up_with_code_75(tmp_path: Path):
    with agent(f"127.0.0.1:{free_port()}", "ant", tmp_path, "--connect-timeout", "2s") as ant:
        assert ant.end() == 75
    lines = ant.read_log().splitlines()
    assert len([line for line in lines if "; next try in " in line]) >= 2
    assert "did not answer within 2 s" in lines[-1]
    assert "Traceback" not in ant.read_log()


@pytest.mark.parametrize(
    ("flags", "extra", "words"),
    [
        ((), {"AYNI_TOKEN": "another-token-of-length"}, "the join token is missing or wrong"),
        (("--run-id", "other"), {}, "run_id differs: this coordinator has toy, the caller has other"),
        (("--listen", "127.0.0.1:USED"), {}, "can't listen on 127.0.0.1:"),
        (("--cache-dir", "/proc/nowhere"), {}, "/proc/nowhere"),
        (("--backend", "wgpu"), {}, "backend wgpu is not available"),
    ],
    ids=["wrong token", "wrong run", "port in use", "no cache folder", "no such device"],
)
def test_what_can_not_work_fails_at_once_with_one_sentence(
    tmp_path: Path, flags: tuple[str, ...], extra: dict[str, str], words: str
):
    with coordinator(tmp_path, RUN) as server:
        used = server.address.rpartition(":")[2]
        given = [flag.replace("USED", used) for flag in flags]
        with agent(server.address, "ant", tmp_path, *given, **extra) as ant:
            assert ant.end() == 1
    assert "next try" not in ant.read_log()
    assert "Traceback" not in ant.read_log()
    assert words in ant.read_log().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "extra", "words"),
    [
        ((), {"AYNI_TOKEN": ""}, "no join token: give --token-file"),
        (("--token-file", "nowhere"), {}, "can't read the join token in nowhere"),
        (("--log-format", "xml"), {}, "log_format is 'xml'; it must be one of text, json"),
        (("--coordinator", "nowhere"), {}, "'nowhere' is not an address; write host:port"),
        (("--coordinator", "192.0.2.1:5"), {}, "dialling 192.0.2.1:5 without TLS would show the join token"),
        (("--listen", "0.0.0.0:0"), {}, "listening on 0.0.0.0:0 without TLS would show the join token"),
        (("--tls-ca", "nowhere.pem"), {}, "can't read the TLS CA nowhere.pem"),
        (("--thread", "2"), {}, "unrecognized arguments: --thread"),
    ],
)
def test_wrong_use_is_told_with_code_2(tmp_path: Path, flags: tuple[str, ...], extra: dict[str, str], words: str):
    with agent("127.0.0.1:9", "ant", tmp_path, *flags, **extra) as ant:
        assert ant.end() == 2
    assert words in ant.read_log().splitlines()[-1]


def code_here(server: CoordinatorProcess, name: str, folder: Path) -> int:
    """Runs an agent in this process, which has torch already, and returns its exit code."""
    (folder / "join.token").write_text(TOKEN)
    (folder / "join.token").chmod(0o600)
    config = WorkerConfig(
        coordinator=server.address,
        token_file=folder / "join.token",
        name=name,
        backend="cpu",
        cache_dir=folder / "cache",
        output_dir=folder / name,
        tensorboard=False,
    )
    return exit_code_of(Agent(config).run)


OWN = """
import builtins
import os
from tests.support.toy_task import ToyTask

class NeedsFile(ToyTask):
    def __init__(self, options, context):
        context.files.path("train.txt")

class NoSamples(ToyTask):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.num_samples = 0

class Raising(ToyTask):
    def __init__(self, options, context):
        raise getattr(builtins, os.environ["OWN_ERROR"])("no luck")

class Named(ToyTask):
    def dataset_fingerprint(self):
        return os.environ["OWN_DATA"]

    def model_name(self):
        return os.environ["OWN_MODEL"]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Makes the module own_task importable, here and with the environment that is returned."""
    extra = module(tmp_path / "own", OWN)
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    yield extra
    sys.modules.pop("own_task", None)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({}, "its run file names no task"),
        ({"name": "nowhere:Task"}, "there is no module 'nowhere' on this worker's Python path"),
        ({"name": TOY, "options": {"widht": 3}}, "widht is not a known name; did you mean"),
        ({"name": "own_task:NeedsFile"}, "the run has no file 'train.txt'; it has no files at all"),
        ({"name": "own_task:NoSamples"}, "has no training samples"),
    ],
    ids=["no task", "no module", "wrong option", "missing data", "no samples"],
)
@pytest.mark.usefixtures("own")
def test_a_run_that_does_not_fit_this_worker_is_refused_before_joining(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, task: dict, words: str
):
    with coordinator(tmp_path, {**RUN, "task": task}) as server:
        assert code_here(server, "ant", tmp_path) == 1
        assert "joined" not in server.read_log()
    assert caplog.messages[-1].startswith("run toy can't be trained here: ")
    assert words in caplog.messages[-1]
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("error", ["RuntimeError", "TypeError", "KeyError"])
@pytest.mark.usefixtures("own")
def test_a_task_that_can_not_be_built_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: str
):
    monkeypatch.setenv("OWN_ERROR", error)
    with coordinator(tmp_path, {**RUN, "task": {"name": "own_task:Raising"}}) as server:
        assert code_here(server, "ant", tmp_path) == 1
    shown = [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert shown[-1].getMessage().startswith(f"run toy can't be trained here: {error}: ")
    assert "no luck" in shown[-1].getMessage()
    assert not any(record.exc_info for record in shown)


LOADING = [("listening", 0.0), ("listening", 0.3), ("listening", 0.9), ("loading task", 0.0), ("loading task", 0.8)]


@pytest.mark.parametrize(("moment", "later"), LOADING)
def test_a_signal_while_loading_ends_an_agent_with_code_1(tmp_path: Path, moment: str, later: float):
    with coordinator(tmp_path, RUN) as server, agent(server.address, "ant", tmp_path, "--log-format", "json") as ant:
        if moment == "listening":
            ant.address()
        else:
            ant.wait_for_log(moment)
        time.sleep(later)  # a moment somewhere inside the imports: every one is as good
        ant.process.send_signal(signal.SIGTERM)
        assert ant.end() == 1
    messages = [json.loads(line)["message"] for line in ant.read_log().splitlines()]
    assert "SIGTERM: stopping; again to exit at once" in messages


def test_a_worker_that_was_frozen_for_too_long_learns_that_it_is_no_member_any_more_and_comes_back(tmp_path: Path):
    timeouts = {"lease": "1s", "heartbeat_interval": "200ms", "shutdown": "2s"}
    run = {**LONG, "start_workers": 2, "min_workers": 1, "timeouts": timeouts}
    with (
        coordinator(tmp_path, run) as server,
        agent(server.address, "ant", tmp_path),
        agent(server.address, "bee", tmp_path) as bee,
    ):
        bee.wait_for_log("step 3 of")
        bee.process.send_signal(signal.SIGSTOP)
        try:
            server.wait_for_log("worker bee left: its lease ended")
        finally:
            bee.process.send_signal(signal.SIGCONT)
        bee.wait_for_log("caught up with the run")
        bee.process.send_signal(signal.SIGTERM)
        assert bee.end() == 1
    assert "is no member any more: its lease ended" in bee.read_log()
    assert "rejoined as worker 2 after" in bee.read_log()
    assert "the run is over" not in bee.read_log()
    assert "Traceback" not in bee.read_log()


def test_a_worker_with_other_data_or_another_model_is_refused_by_name(
    tmp_path: Path, own: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run = {**RUN, "task": {"name": "own_task:Named"}}
    with (
        coordinator(tmp_path, run) as server,
        agent(server.address, "ant", tmp_path, OWN_DATA="aa", OWN_MODEL="small", **own) as ant,
    ):
        ant.wait_for_log("waiting for 1 more worker")
        for name, data, model, words in (
            (
                "bee",
                "bb",
                "small",
                "dataset_fingerprint differs: this run has aa (40 training and 12 held-out samples)",
            ),
            ("bee", "aa", "large", "task_fingerprint differs"),
            ("ant", "aa", "small", "worker name 'ant' belongs to live worker 0"),
        ):
            monkeypatch.setenv("OWN_DATA", data)
            monkeypatch.setenv("OWN_MODEL", model)
            assert code_here(server, name, tmp_path) == 1
            assert words in caplog.messages[-1]
            assert caplog.records[-1].exc_info is None


def test_a_checkpoint_that_can_not_be_written_is_told_to_everybody(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "ant").mkdir()
    (tmp_path / "ant" / "checkpoints").write_text("in the way")
    with coordinator(tmp_path, {**RUN, "min_workers": 1}) as server:
        assert code_here(server, "ant", tmp_path) == 1
        assert "checkpoints" in caplog.messages[-1]
        assert caplog.records[-1].exc_info is None
        server.wait_for_log("worker ant left: failed: ")


HELP = """
import sys
from worker_agent.__main__ import main
try:
    main(["--help"])
except SystemExit as end:
    print(f"code {end.code}, loaded {sorted({'torch', 'grpc', 'numpy', 'rich'} & sys.modules.keys())}")
"""


def test_help_loads_nothing_heavy():
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "code 0, loaded []"
    for flag in ("--coordinator", "--token-file", "--backend", "--tls-ca", "--server-tls-certificate", "--insecure"):
        assert flag in done.stdout
