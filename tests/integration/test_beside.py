"""An agent that has to start the coordinator beside itself, and can't."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.coordinator import ROOT
from tests.support.joined_runs import free_port


def start(folder: Path, run: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.yaml").write_text(run)
    outer = {key: value for key, value in os.environ.items() if not key.startswith("AYNI_")}
    place = ["--launch-run", "run.yaml", "--launch-rank", "0", "--coordinator", f"127.0.0.1:{free_port()}"]
    path = os.pathsep.join((str(ROOT), str(ROOT / "proto")))
    return subprocess.run(
        [sys.executable, "-m", "worker_agent", "--launch-by", "none", *place],
        cwd=folder,
        env={**outer, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("run", "variables", "sentence"),
    [
        ("run_id: toy\n", {}, "no join token: give --token-file"),
        ("run_id: toy\nno_such_key: 1\n", {"AYNI_TOKEN": "a token of 20 chars".replace(" ", "-")}, "no_such_key"),
    ],
    ids=["no token", "a wrong run file"],
)
def test_wrong_use_of_the_coordinator_is_wrong_use_of_the_agent(
    tmp_path: Path, run: str, variables: dict[str, str], sentence: str
):
    done = start(tmp_path, run, **variables)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert "the coordinator of run file run.yaml" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_coordinator_that_fails_fails_the_agent(tmp_path: Path):
    (tmp_path / "state").write_text("not a folder")
    done = start(tmp_path, "run_id: toy\nstate_dir: state\n", AYNI_TOKEN="a" * 20)
    assert done.returncode == 1, done.stderr
    assert "with code 1; what it said is above" in done.stderr.splitlines()[-1]
