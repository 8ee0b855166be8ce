"""The program behind `make train`: real processes, whole or failing."""

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.support.coordinator import ROOT, environment

TEXT = "In the beginning was the word, and the word was long enough for a few windows of text.\n" * 20
RUN: dict[str, Any] = {
    "run_id": "local",
    "seed": 3,
    "num_steps": 3,
    "min_workers": 2,
    "task": {
        "name": "causal_lm",
        "options": {
            "train": ["train.txt"],
            "tokenizer": "bytes",
            "context": 16,
            "width": 16,
            "inner_width": 32,
            "num_blocks": 1,
            "num_heads": 2,
        },
    },
    "batch": {"samples": 8, "microbatches": 4, "evaluation_samples": 16},
}


def train(folder, run: dict, *flags: str) -> subprocess.CompletedProcess:
    (folder / "files").mkdir(exist_ok=True)
    (folder / "files" / "train.txt").write_text(TEXT)
    (folder / "run.yaml").write_text(yaml.safe_dump({**run, "artifacts": str(folder / "files")}))
    program, cache = ROOT / "scripts" / "train_local.py", f"--worker-flag={folder / 'cache'}"
    places = ("--run", folder / "run.yaml", "--output-dir", folder / "out", "--worker-flag=--cache-dir", cache)
    return subprocess.run(
        [sys.executable, program, *places, *flags],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(),
        cwd=folder,
        check=False,
    )


def test_job_ends_with_one_json_line_and_the_same_parameters_for_any_number_of_workers(tmp_path):
    results = []
    for workers in ("2", "1"):
        finished = train(tmp_path, RUN, "--workers", workers)
        assert finished.returncode == 0, finished.stderr
        results.append(json.loads(finished.stdout.splitlines()[-1]))
        assert (tmp_path / "out" / "worker-0.log").exists()
    assert [result["workers"] for result in results] == [2, 1]
    assert results[0]["parameters_sha256"] == results[1]["parameters_sha256"] != ""
    assert results[0]["steps"] == 3
    assert results[0]["bits_per_byte"] == pytest.approx(results[0]["loss"] / 0.6931471805599453, abs=1e-3)
    assert not (tmp_path / "out" / "join.token").exists()


def test_job_ends_when_its_workers_can_not_start(tmp_path):
    options = {**RUN["task"]["options"], "width": -3}
    finished = train(tmp_path, {**RUN, "task": {"name": "causal_lm", "options": options}})
    assert finished.returncode == 1
    assert "can't be trained here" in finished.stderr
    assert "workers are left, 2 are needed" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_number_of_workers_is_checked(tmp_path, number):
    finished = train(tmp_path, RUN, "--workers", number)
    assert finished.returncode == 2
    assert "--workers" in finished.stderr
