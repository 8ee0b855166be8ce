"""The program behind `make interop`, with the Python worker alone: other languages take their compilers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import interop_run
from scripts.interop_builds import InteropError
from tests.support.coordinator import ROOT, environment


def interop(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "interop.py"), "--languages", "python", *flags]
    return subprocess.run(
        [*command, "--output-dir", str(folder)],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_worker_of_generated_stubs_alone_survives_a_death_with_the_same_parameters(tmp_path):
    finished = interop(tmp_path)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout.splitlines()[-1])
    assert (result["languages"], result["steps"]) == (["python"], 30)
    assert "worker killed left" in (tmp_path / "together" / "coordinator.log").read_text()


def test_a_worker_that_fails_is_named_with_its_log(tmp_path, monkeypatch):
    program = tmp_path / "worker"
    program.write_text("#!/bin/sh\necho 'no luck today' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(interop_run, "folder_of", lambda language: tmp_path)
    with pytest.raises(InteropError, match=r"(?s)first ended with 3; .*no luck today"):
        interop_run.run_workers({"first": "python"}, tmp_path / "run")
