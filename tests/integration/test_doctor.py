"""The doctor against a real coordinator, and against none."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.coordinator import TOKEN, coordinator, environment
from worker_agent.doctor import examine
from worker_agent.doctor_config import DoctorConfig
from worker_agent.portable.engines import Finding

RUN = {"run_id": "toy", "num_steps": 1, "min_workers": 1, "task": {"name": "tests.support.toy_task:ToyTask"}}
SHORT = timedelta(seconds=0.2)


def nothing(engine: str, allow_software: bool) -> Finding:
    return Finding(engine=engine, refusal="absent")


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AYNI_TOKEN", TOKEN)


def test_the_connection_to_a_coordinator_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with coordinator(tmp_path, RUN) as server:
        assert examine(DoctorConfig(coordinator=server.address, measure_for=SHORT, json=True), nothing) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["ok"], found["link"]["run_id"], found["link"]["problem"]) == (True, "toy", "")
        assert 0 < found["link"]["round_trip_s"] < 5
        assert found["link"]["out_bytes_per_s"] > 1e6
        assert found["link"]["in_bytes_per_s"] > 1e6
        # It has joined nothing.
        assert "joined" not in server.read_log()


def test_a_wrong_token_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with coordinator(tmp_path, RUN) as server:
        monkeypatch.setenv("AYNI_TOKEN", "another-token-for-tests")
        assert examine(DoctorConfig(coordinator=server.address), nothing) == 1
    assert "it refused: the join token is missing or wrong" in capsys.readouterr().out


def test_a_coordinator_that_is_not_there_is_temporary(capsys: pytest.CaptureFixture[str]):
    assert examine(DoctorConfig(coordinator="127.0.0.1:9", connect_timeout=SHORT), nothing) == 75
    assert "Coordinator at 127.0.0.1:9: the coordinator at 127.0.0.1:9 did not answer" in capsys.readouterr().out


def test_a_backend_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]):
    assert examine(DoctorConfig(backend="wgpu"), nothing) == 1
    assert "A worker can't start here with --backend wgpu" in capsys.readouterr().out


def test_the_command_prints_json_and_its_help():
    command = [sys.executable, "-m", "worker_agent", "doctor", "--backend", "cpu", "--wgpu-engine", "mps"]
    ended, helped = (
        subprocess.run([*command, flag], capture_output=True, text=True, env=environment(), timeout=60)
        for flag in ("--json", "--help")
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["chosen"] == "cpu"
    assert "--coordinator" in helped.stdout
