"""The chaos program itself: it disturbs a real run, prints one JSON object, and finds what was lost."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.coordinator import ROOT, environment

PROGRAM = ROOT / "scripts" / "chaos.py"


def run_program(folder: Path, *flags: str, expected: int = 0) -> tuple[list[dict[str, Any]], str]:
    command = [sys.executable, str(PROGRAM), "--output-dir", str(folder), *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=environment(), cwd=folder
    )
    assert done.returncode == expected, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.timeout(300)
def test_a_short_run_through_deaths_on_both_sides_ends_with_equal_parameters(tmp_path):
    flags = ("--seed", "7", "--steps", "30", "--workers", "2", "--every", "6", "--step-ms", "150")
    (result,), progress = run_program(tmp_path, *flags, "--kinds", "kill,coordinator,link,nan", "--store-every", "0")
    assert result["seed"] == 7
    assert (result["steps_committed"], result["samples_missing"], result["samples_duplicated"]) == (30, 0, 0)
    assert result["parameters_equal"] is True
    assert result["ledger"] == "clean"
    assert {event["kind"] for event in result["events"]} == set(result["worst_stall_s"])
    assert {"kill", "coordinator"} & set(result["worst_stall_s"])
    assert result["goodput"] > 0
    assert all(f"step {event['step']}: {event['kind']}" in progress for event in result["events"])
    assert (tmp_path / "seed-7" / "coordinator.log").exists()


def test_a_kind_that_there_is_not_is_named(tmp_path):
    _, said = run_program(tmp_path, "--kinds", "kill,earthquake", expected=2)
    assert "earthquake" in said
