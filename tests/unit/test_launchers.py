"""What launchers say becomes hints; what was given explicitly wins."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ayni.flags import Resolved, describe, resolve_or_exit
from worker_agent import job, launchers
from worker_agent.beside import beside_config, command, listen_address
from worker_agent.config import WorkerConfig
from worker_agent.launchers import LAUNCHERS, LaunchConfig, first_host, worker_name
from worker_agent.ray_config import RayConfig, split_arguments

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "launchers.json").read_text())
SLURM = GOLDEN["slurm"]["environment"]
OPENMPI = GOLDEN["openmpi"]["environment"]


def read(environ: Mapping[str, str], *arguments: str) -> Resolved[WorkerConfig]:
    parser = argparse.ArgumentParser("agent", allow_abbrev=False)
    return resolve_or_exit(parser, WorkerConfig, arguments, environ, lambda given: launchers.hints(given, environ))


def refusal(capsys: pytest.CaptureFixture[str], environ: Mapping[str, str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        read(environ, *arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", GOLDEN)
def test_recorded_environments_mean_what_they_say(name: str) -> None:
    config = read(GOLDEN[name]["environment"]).config
    found = {key: getattr(config.launch, key) for key in ("rank", "world_size", "local_rank", "attempt")}
    assert {**found, "coordinator": config.coordinator} == GOLDEN[name]["expected"]
    assert config.launch.by == ("auto" if name == "none" else name)


def test_every_launcher_has_a_recorded_environment() -> None:
    assert GOLDEN.keys() - {"none"} == LAUNCHERS.keys()


def test_flags_variables_and_files_win_over_the_launcher(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("launch: {attempt: 7}\n")
    resolved = read({**SLURM, "AYNI_LAUNCH_RANK": "0"}, "--coordinator", "n09:1", "--config", str(file))
    config = resolved.config
    assert (config.coordinator, config.launch.rank, config.launch.attempt) == ("n09:1", 0, 7)
    assert resolved.hinted == ("launch.by", "launch.world_size", "launch.local_rank")
    shown = describe(resolved)
    assert "launch.world_size = 2" in shown
    assert "# SLURM_STEP_NUM_TASKS of Slurm" in shown
    assert "# AYNI_LAUNCH_RANK" in shown


def test_what_was_taken_is_said_with_its_variables() -> None:
    resolved = read(SLURM, "--launch-port", "6000")
    assert launchers.described(resolved.hinted_values(), resolved.origins) == (
        "taken from the environment: launch.by slurm [SLURM_STEP_ID of Slurm], launch.rank 1 [SLURM_PROCID of Slurm], "
        "launch.world_size 2 [SLURM_STEP_NUM_TASKS of Slurm], launch.local_rank 0 [SLURM_LOCALID of Slurm], "
        "launch.attempt 1 [SLURM_RESTART_COUNT of Slurm], "
        "coordinator 127.0.0.2:6000 [SLURM_STEP_NODELIST of Slurm and launch.port]"
    )


def test_a_launcher_is_ignored_or_named_explicitly() -> None:
    both = {**SLURM, **OPENMPI}
    assert read(both).config.launch.by == "openmpi"
    assert read(both, "--launch-by", "slurm").config.launch.attempt == 1
    ignored = read(both, "--launch-by", "none", "--coordinator", "n1:1")
    assert (ignored.hinted, ignored.config.launch.rank) == ((), None)


@pytest.mark.parametrize(
    ("environ", "flags", "words"),
    [
        ({**SLURM, "SLURM_PROCID": "x"}, (), "launch.rank must be a whole number"),
        ({**SLURM, "SLURM_PROCID": "x"}, (), "found 'x' (text) [SLURM_PROCID of Slurm]"),
        ({**SLURM, "SLURM_PROCID": "-1"}, (), "launch.rank is -1; it is out of range [SLURM_PROCID of Slurm]"),
        ({**SLURM, "SLURM_PROCID": "2"}, (), "launch.rank is 2; it must be below launch.world_size, 2"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1"}, (), "coordinator: Slurm's variables name no host: 'n[1' is no list"),
        (
            {**GOLDEN["torchrun"]["environment"], "MASTER_ADDR": "a b"},
            (),
            "coordinator: torchrun's variables name no host: 'a b:50051' is not an address",
        ),
        ({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"}, (), "give --coordinator HOST:PORT, or AYNI_COORDINATOR with mpirun"),
        ({"JOB_COMPLETION_INDEX": "0"}, (), "an Indexed Job does not say where the coordinator is"),
        ({}, (), "coordinator is missing; it has no default"),
        (SLURM, ("--launch-by", "openmpi"), "launch.rank: Open MPI was named, but OMPI_COMM_WORLD_RANK is not set"),
        (SLURM, ("--launch-by", "pbs"), "launch.by is 'pbs'; it must be one of auto, none, ray, torchrun"),
        ({"AYNI_COORDINATOR": "a:1"}, ("--launch-run", "run.yaml"), "launch.run needs launch.rank"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_variable(
    capsys: pytest.CaptureFixture[str], environ: dict[str, str], flags: tuple[str, ...], words: str
) -> None:
    assert words in refusal(capsys, environ, *flags)


def test_a_malformed_variable_does_not_matter_where_a_flag_says_it() -> None:
    broken = {**SLURM, "SLURM_PROCID": "x", "SLURM_STEP_NODELIST": "n["}
    config = read(broken, "--coordinator", "n1:1", "--launch-rank", "1").config
    assert (config.coordinator, config.launch.rank) == ("n1:1", 1)


@pytest.mark.parametrize(
    ("hostlist", "first"),
    [
        *(("n1", "n1"), ("n1,n2", "n1"), ("n[01-03,7],m4", "n01"), ("rack[1-2]n[10-11]", "rack1n10"), ("n[5]", "n5")),
        ("127.0.0.[2-3]", "127.0.0.2"),
    ],
)
def test_the_first_host_of_a_slurm_list(hostlist: str, first: str) -> None:
    assert first_host(hostlist) == first


@pytest.mark.parametrize("hostlist", ["", ",n1", "n[1", "n1]", "n[]", "n[a-b]", "n 1", "[", "n[1-]"])
def test_what_is_no_slurm_list(hostlist: str) -> None:
    with pytest.raises(ValueError, match="is no list of hosts"):
        first_host(hostlist)


def test_an_ipv6_host_gets_brackets() -> None:
    environ = {**GOLDEN["torchrun"]["environment"], "MASTER_ADDR": "fd00::1"}
    assert read(environ).config.coordinator == "[fd00::1]:50051"


def test_names_begin_with_the_host_and_tell_attempts_apart() -> None:
    assert worker_name(LaunchConfig(), "ant", 42) == "ant-42"
    assert worker_name(LaunchConfig(rank=3), "ant", 42) == "ant-r3-42"
    assert worker_name(LaunchConfig(rank=3, attempt=2), "ant", 42) == "ant-r3.2-42"


def test_only_rank_0_starts_the_coordinator_and_no_token_is_in_its_command_line() -> None:
    run = ("--launch-run", "run.yaml", "--insecure", "--token-file", "run.token", "--log-format", "json")
    environ = {**SLURM, "SLURM_STEP_NODELIST": "n[01-02]", "AYNI_TOKEN": "a-secret-of-this-run"}
    assert not read(environ, *run).config.launch.starts_coordinator
    config = read({**environ, "SLURM_PROCID": "0"}, *run).config
    assert config.launch.starts_coordinator
    beside = beside_config(config)
    assert beside.is_again
    line = command(beside, 2)
    assert line[1:] == [
        *("-m", "coordinator_service", "--config", "run.yaml", "--listen", "0.0.0.0:50051", "--start-workers", "2"),
        *("--token-file", "run.token", "--log-format", "json", "--insecure"),
    ]


@pytest.mark.parametrize(
    ("coordinator", "listen"),
    [("127.0.0.2:5", "127.0.0.2:5"), ("n1:5", "0.0.0.0:5"), ("[fd00::1]:5", "[::]:5"), ("[::1]:5", "[::1]:5")],
)
def test_a_coordinator_listens_on_all_interfaces_unless_loopback_was_named(coordinator: str, listen: str) -> None:
    assert str(listen_address(coordinator)) == listen


@pytest.mark.parametrize(("local_rank", "chosen"), [(None, []), (0, [0]), (3, [3]), (5, [1])])
def test_workers_of_one_host_take_one_accelerator_each_in_turn(
    monkeypatch: pytest.MonkeyPatch, local_rank: int | None, chosen: list[int]
) -> None:
    taken: list[int] = []
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4, set_device=taken.append)
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(cuda=cuda))
    job._choose_accelerator(local_rank)
    assert taken == chosen


def test_what_a_ray_driver_is_told() -> None:
    assert split_arguments(["--agents", "2", "--", "--backend", "cpu"]) == (["--agents", "2"], ["--backend", "cpu"])
    assert split_arguments(["--agents", "2"]) == (["--agents", "2"], [])
    with pytest.raises(ValueError, match="run or coordinator is needed"):
        RayConfig(agents=2)
    with pytest.raises(ValueError, match="agents is 0"):
        RayConfig(agents=0, coordinator="n1:1")
    with pytest.raises(ValueError, match="restarts at least -1"):
        RayConfig(agents=1, coordinator="n1:1", restarts=-2)
