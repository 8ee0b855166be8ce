"""The coordinator's command line, its files and its status, as an operator and a bare machine see them."""

import asyncio
import contextlib
import hashlib
import json
import os
import pty
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from ayni.errors import BadRequest, Checksum, Halted, UnknownArtifact
from ayni.rpc import error_from
from ayni.v1 import coordinator_pb2 as pb
from coordinator_service.__main__ import main
from tests.support.coordinator import ROOT, CoordinatorProcess, coordinator, environment, raw_worker, raw_workers

RUN: dict[str, Any] = {
    "run_id": "command",
    "num_steps": 2,
    "min_workers": 2,
    "batch": {"samples": 10, "microbatches": 5},
    "timeouts": {"shutdown": "1s"},
}


def command(*arguments: str, **extra_environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "coordinator_service", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**extra_environment),
        cwd=ROOT,
        check=False,
    )


def test_help_names_every_setting_and_its_default():
    result = command("--help")
    assert result.returncode == 0
    for flag in (
        "--listen",
        "--token-file",
        "--min-workers",
        "--batch-microbatches",
        "--tls-certificate",
        "--insecure",
    ):
        assert flag in result.stdout
    assert "127.0.0.1:0" in result.stdout


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("num_step: 3\n", ["num_step is not a known name; did you mean num_steps?"]),
        ("batch: {sample: 3}\nseed: x\n", ["batch.sample", "did you mean batch.samples?", "seed"]),
        ("batch: {samples: 3, microbatches: 4}\n", ["batch.microbatches (4) is more than batch.samples (3)"]),
        ("timeouts: {lease: 1s, heartbeat_interval: 2s}\n", ["heartbeat_interval (2 s) < lease (1 s)"]),
        ("batch: {samples: 100000000000000000000}\n", ["batch.samples is 100000000000000000000; it must be 1 to"]),
        ("batch: {samples: 100000, microbatches: 100000}\n", ["batch.microbatches is 100000; it must be 0 to 65536"]),
        ("max_bucket_bytes: -5\n", ["max_bucket_bytes is -5; it must be at least 1"]),
        ("task: {name: causal_lm}\n", ["num_steps is 0"]),
        ("seed: 1\nseed: 2\n", ["'seed' is given twice"]),
        ("- 1\n", ["must hold a mapping"]),
    ],
)
def test_wrong_run_file_is_refused_whole(tmp_path, monkeypatch, capsys, text, sentences):
    def serve(_: object) -> int:
        raise AssertionError("it was taken")

    monkeypatch.setattr("ayni.process.run_until_signal", serve)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(tmp_path / "run.yaml")])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    for sentence in sentences:
        assert sentence in said


def test_missing_run_file_is_named_without_a_traceback(tmp_path):
    result = command("--config", str(tmp_path / "none.yaml"))
    assert result.returncode == 2
    assert "none.yaml" in result.stderr
    assert "Traceback" not in result.stderr


def test_token_is_required(tmp_path):
    result = command("--state-dir", str(tmp_path), AYNI_TOKEN="")
    assert result.returncode == 2
    assert "no join token" in result.stderr


def test_other_addresses_than_loopback_need_tls(tmp_path):
    result = command("--state-dir", str(tmp_path), "--listen", "0.0.0.0:0")
    assert result.returncode == 2
    assert "without TLS" in result.stderr


def test_port_in_use_is_said(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = command("--state-dir", str(tmp_path), "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert result.returncode == 1
    assert "Address already in use" in result.stderr


def test_a_port_of_the_dashboard_that_is_in_use_is_said_with_its_flag(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = command("--state-dir", str(tmp_path), "--dashboard", address)
    assert result.returncode == 1
    assert f"--dashboard: can't listen on {address}: Address already in use; stop the other process" in result.stderr
    assert "Errno" not in result.stderr


def test_missing_artifacts_and_links_that_lead_out_are_refused(tmp_path):
    result = command("--state-dir", str(tmp_path / "s"), "--artifacts", str(tmp_path / "none"))
    assert (result.returncode, "is not a folder" in result.stderr) == (2, True)
    (tmp_path / "files").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "files" / "link").symlink_to(tmp_path / "secret")
    result = command("--state-dir", str(tmp_path / "s"), "--artifacts", str(tmp_path / "files"))
    assert (result.returncode, "leads out of" in result.stderr) == (2, True)


def test_second_coordinator_on_the_same_state_is_refused(tmp_path):
    with coordinator(tmp_path, RUN):
        result = command("--config", str(tmp_path / "run.yaml"))
    assert result.returncode == 1
    assert "another coordinator has" in result.stderr


def test_committed_run_is_not_started_over(tmp_path):
    with coordinator(tmp_path, {**RUN, "num_steps": 1}) as process:

        async def scenario():
            async with raw_workers(process.address, "ant", "bee") as workers:
                weights = [{m: 0 for m in worker.leased} for worker in workers]
                await asyncio.gather(*(w.commit(own, 0) for w, own in zip(workers, weights, strict=True)))
                for worker in workers:
                    assert (await worker.next_frame()).shutdown.finished
                    await worker.leave()

        asyncio.run(scenario())
        assert process.process.wait(20) == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "command" / "run.sqlite3")) as database:
        assert database.execute("SELECT step, kind FROM commits").fetchall() == [(0, "train")]
    result = command("--config", str(tmp_path / "run.yaml"))
    assert result.returncode == 2
    assert "is finished, after 1 steps" in result.stderr


def test_interrupted_coordinator_tells_its_workers(tmp_path):
    with coordinator(tmp_path, RUN) as process:

        async def scenario():
            async with raw_workers(process.address, "ant", "bee") as workers:
                process.process.send_signal(signal.SIGINT)
                return [(await worker.next_frame()).shutdown for worker in workers]

        shutdowns = asyncio.run(scenario())
        assert process.process.wait(20) == 1
    assert [s.reason for s in shutdowns] == ["the coordinator was interrupted"] * 2
    assert not any(s.finished for s in shutdowns)


def test_terminated_coordinator_leaves_its_workers_to_the_next_one(tmp_path):
    """SIGTERM is what a supervisor sends before it starts the process again."""
    with coordinator(tmp_path, RUN) as process:

        async def scenario():
            async with raw_workers(process.address, "ant", "bee") as workers:
                process.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*(w.next_frame() for w in workers), return_exceptions=True)

        ends = asyncio.run(scenario())
        assert process.process.wait(20) == 75
    assert all(isinstance(end, grpc.aio.AioRpcError | AssertionError) for end in ends), "a broken stream, no goodbye"
    with coordinator(tmp_path, RUN) as process:

        async def again():
            async with raw_workers(process.address, "ant", "bee") as workers:
                return [worker.assignment for worker in workers]

        leases = asyncio.run(again())
    assert {(lease.step, lease.epoch) for lease in leases} == {(0, 2)}


def test_who_left_is_said(tmp_path):
    with coordinator(tmp_path, RUN) as process:

        async def scenario():
            async with raw_workers(process.address, "ant", "bee") as (_, bee):
                await bee.leave("interrupted (SIGINT)")

        asyncio.run(scenario())
        process.wait_for_log("worker bee left: interrupted (SIGINT)")


async def fetched(worker, sha256: str, offset: int = 0) -> bytes:
    request = pb.FetchArtifactRequest(sha256=sha256, offset_bytes=offset)
    data = b""
    async for response in worker.stub.FetchArtifact(request, timeout=30):
        assert response.chunk.offset_bytes == offset + len(data)
        data += response.chunk.data
    return data


def test_artifacts_are_served_by_hash_from_any_offset(tmp_path):
    files = tmp_path / "files"
    (files / "model").mkdir(parents=True)
    big = os.urandom(3 * 2**20 + 17)
    (files / "model" / "weights").write_bytes(big)
    (files / "empty").write_bytes(b"")
    with coordinator(tmp_path / "c", {**RUN, "artifacts": str(files)}) as process:

        async def scenario():
            async with raw_worker(process.address, "bare") as worker:
                run = await worker.stub.GetRun(pb.GetRunRequest(run_id="command"), timeout=10)
                listed = {a.name: a for a in run.artifacts}
                assert set(listed) == {"model/weights", "empty"}
                weights = listed["model/weights"]
                assert (weights.sha256, weights.size_bytes) == (hashlib.sha256(big).hexdigest(), len(big))
                assert await fetched(worker, weights.sha256) == big
                assert await fetched(worker, weights.sha256, 2**20 + 5) == big[2**20 + 5 :]
                assert await fetched(worker, listed["empty"].sha256) == b""
                assert str(files) not in run.config_json, "paths on the coordinator's machine stay there"
                refusals = []
                for sha256, offset in (("../../secret", 0), ("0" * 64, 0), (weights.sha256, len(big) + 1)):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await fetched(worker, sha256, offset)
                    refusals.append(type(error_from(caught.value)))
                for change in (lambda path: path.write_bytes(b"other"), lambda path: path.unlink()):
                    change(files / "model" / "weights")
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await fetched(worker, weights.sha256)
                    refusals.append(type(error_from(caught.value)))
                return refusals, json.loads(run.config_json)

        refusals, config = asyncio.run(scenario())
    assert refusals == [UnknownArtifact, UnknownArtifact, BadRequest, Checksum, Checksum]
    assert config["batch"] == {"samples": 10, "microbatches": 5, "evaluation_samples": 64}


def test_status_shows_who_is_waited_for(tmp_path):
    with coordinator(tmp_path, RUN) as process:

        async def scenario():
            async with raw_workers(process.address, "ant", "bee") as (ant, _):
                await ant.stub.Heartbeat(
                    pb.HeartbeatRequest(worker_id=ant.worker_id, step=0, activity="computing"), timeout=10
                )
                status = await asyncio.to_thread(command, "status", process.address)
                snapshots = ant.stub.WatchRun(pb.WatchRunRequest(), timeout=20)
                first = last = (await snapshots.read()).snapshot
                await ant.leave("enough")
                while len(last.workers) > 1:
                    last = (await snapshots.read()).snapshot
                return status, first, last

        status, first, last = asyncio.run(scenario())
    assert status.returncode == 0, status.stderr
    assert "step 0 waits for ant (computing), bee (joining)" in status.stdout
    assert "run command: running, 0 of 2 steps committed, epoch 1" in status.stdout
    assert [w.worker_name for w in first.workers] == ["ant", "bee"]
    assert [round(w.share, 1) for w in first.workers] == [0.4, 0.6]
    assert last.waiting.reason == "waiting for 1 more worker (1 of 2)"


def test_status_of_nobody_is_temporary():
    result = command("status", "127.0.0.1:1")
    assert result.returncode == 75
    assert "can't reach a coordinator at 127.0.0.1:1" in result.stderr
    assert "does it ask for a client certificate (--tls-certificate, --tls-key)?" in result.stderr


def test_status_with_a_wrong_token_is_refused(tmp_path):
    with coordinator(tmp_path, RUN) as process:
        result = command("status", process.address, AYNI_TOKEN="another-token-of-length")
    assert result.returncode == 1
    assert "join token is missing or wrong" in result.stderr


@contextlib.contextmanager
def full_disk(process: CoordinatorProcess) -> Iterator[None]:
    """Lets the database grow no more, as a full disk does; the log is smaller and may still be written."""
    soft, hard = resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE)
    size = (process.folder / "state" / "command" / "run.sqlite3-wal").stat().st_size
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (size, hard))
    yield
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (soft, hard))


async def commit_nothing(address: str, full: Callable[[], contextlib.AbstractContextManager[None]]) -> list[Any]:
    """Commits a step with the disk full; returns the answers."""
    async with raw_workers(address, "ant", "bee") as workers:
        weights = [{m: 0 for m in worker.leased} for worker in workers]
        with full():
            asking = [asyncio.create_task(w.commit(own, 0)) for w, own in zip(workers, weights, strict=True)]
            await asyncio.wait(asking, timeout=1.0)
        return await asyncio.gather(*asking, return_exceptions=True)


def test_disk_that_is_full_for_a_while_only_delays_the_commit(tmp_path):
    """Nobody hears of a step that is not durable, and nothing is lost."""
    with coordinator(tmp_path, RUN) as process:
        answers = asyncio.run(commit_nothing(process.address, lambda: full_disk(process)))
        assert process.read_log().count("step 0 can't be written, and is tried again: ") == 1
        assert "step 0 was written after" in process.read_log()
    assert [(answer.step, answer.attempt) for answer in answers] == [(0, 0)] * 2


def test_coordinator_whose_disk_stays_full_ends_without_sending_its_workers_away(tmp_path):
    times = {"heartbeat_interval": "200ms", "lease": "1s", "accept": "2s", "step": "3s", "shutdown": "1s"}

    @contextlib.contextmanager
    def for_ever() -> Iterator[None]:
        full_disk(process).__enter__()
        yield

    with coordinator(tmp_path, {**RUN, "timeouts": times}) as process:
        answers = asyncio.run(commit_nothing(process.address, for_ever))
        assert process.process.wait(20) == 75
        assert "the commit of step 0 can't be written" in process.read_log()
    assert not any(isinstance(error_from(answer), Halted) for answer in answers)


def test_health_and_reflection_need_no_token(tmp_path):
    with coordinator(tmp_path, RUN) as process, grpc.insecure_channel(process.address) as channel:
        request = health_pb2.HealthCheckRequest(service="ayni.v1.CoordinatorService")
        stub: Any = health_pb2_grpc.HealthStub(channel)
        health = stub.Check(request, timeout=10)
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert "ayni.v1.CoordinatorService" in services


def test_fresh_start_does_not_touch_the_state_of_a_live_coordinator(tmp_path):
    with coordinator(tmp_path, RUN) as process:
        result = command("--config", str(tmp_path / "run.yaml"), "--fresh")
        assert process.process.poll() is None
        with contextlib.closing(sqlite3.connect(tmp_path / "state" / "command" / "run.sqlite3")) as database:
            assert ("config",) in database.execute("SELECT name FROM facts").fetchall()
    assert result.returncode == 1
    assert "another coordinator has" in result.stderr


@pytest.mark.parametrize("run_id", ["..", ".", "-x", ".hidden", "a/b"])
def test_run_id_can_not_name_another_folder(tmp_path, run_id):
    (tmp_path / "notes.txt").write_text("keep")
    result = command("--state-dir", str(tmp_path / "state"), f"--run-id={run_id}", "--fresh")
    assert result.returncode == 2
    assert "run_id" in result.stderr
    assert (tmp_path / "notes.txt").exists()


def test_watch_shows_the_run_to_its_end_and_says_how_it_ended(tmp_path):
    ours, theirs = pty.openpty()
    with coordinator(tmp_path, RUN) as process, os.fdopen(ours, "rb", buffering=0) as terminal:
        watching = subprocess.Popen(
            [sys.executable, "-m", "coordinator_service", "status", process.address, "--watch"],
            stdout=theirs,
            env=environment(COLUMNS="80", TERM="xterm"),
            cwd=ROOT,
        )
        os.close(theirs)
        shown = b""
        while shown.count(b"run command: waiting") < 2:
            shown += terminal.read(4096)
        process.process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # Linux ends a terminal that nobody holds any more with an error.
            while piece := terminal.read(4096):
                shown += piece
        assert watching.wait(20) == 1
    assert b"run command: halted" in shown
    assert b"the coordinator was interrupted" in shown
