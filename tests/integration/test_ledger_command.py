"""The ledger command, as an operator sees it: a table, lines of JSON, and whether the run adds up."""

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ayni.run_config import RunConfig
from ayni.settings import from_mapping, to_mapping
from coordinator_service.store import open_folder
from tests.support.commits import commit
from tests.support.coordinator import ROOT, environment

CONFIG = {"run_id": "toy", "seed": 5, "num_steps": 6, "batch": {"samples": 8, "microbatches": 4}}
FACTS = {"config": json.dumps(to_mapping(from_mapping(RunConfig, CONFIG))), "num_training_samples": "20"}


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "coordinator_service", "ledger", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(COLUMNS="200"),
        cwd=ROOT,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with contextlib.closing(open_folder(tmp_path / "toy")) as store:
        store.set_facts(FACTS)
        for step in range(5):
            store.commit(commit(step))
        store.commit(commit(5, kind="evaluate"))
        store.rewind(3, "lost")
        store.commit(commit(3, attempt=1, epoch=2, skipped=(2,), left_behind=("cat",)))
    return tmp_path / "toy"


def test_the_table_shows_who_made_what(run):
    result = command("--run", str(run))
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.split()[1:2] == ["3"]]
    assert "24 to 31" in line
    assert "ant 0 to 0; bee 1 to 3; skipped 2; without cat" in line


def test_the_table_shows_wire_types_where_they_changed(run, tmp_path):
    assert "wire" not in command("--run", str(run)).stdout
    with contextlib.closing(open_folder(tmp_path / "auto")) as store:
        store.set_facts(FACTS)
        for step, wire_type in enumerate(("float32", "bfloat16")):
            store.commit(commit(step, wire_type=wire_type))
    result = command("--run", str(tmp_path / "auto"))
    assert ["wire" in result.stdout, "float32" in result.stdout, "bfloat16" in result.stdout] == [True] * 3


def test_lines_of_json_hold_everything(run):
    result = command("--run", str(run), "--json", "--steps", "1:3")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert records[0]["loss"] == commit(1).loss
    assert records[0]["contributions"][1] == {"worker_name": "bee", "start": 1, "stop": 4, "weight": 6}


def test_what_was_taken_back_is_shown_where_it_is_asked_for(run):
    result = command("--run", str(run), "--json", "--superseded")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(record["kind"], record["step"]) for record in records] == [("train", 3), ("train", 4), ("evaluate", 5)]


def test_a_run_that_adds_up(run):
    result = command("--run", str(run), "--check")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "ok": True,
        "steps": 4,
        "evaluations": 0,
        "passes": 1,
        "samples": 32,
        "samples_missing": 0,
        "samples_duplicated": 0,
        "samples_skipped": 2,
        "problems": [],
        "superseded": 3,
    }


def test_a_run_that_does_not_add_up(run):
    with contextlib.closing(open_folder(run)) as store:
        store.commit(replace(commit(5, epoch=2), total_weight=9))
    result = command("--run", str(run), "--check")
    assert result.returncode == 1
    found = json.loads(result.stdout)
    assert (found["ok"], found["samples_missing"]) == (False, 8)
    assert [problem["name"] for problem in found["problems"]] == ["step", "weight"]


def test_a_run_can_be_read_while_its_coordinator_has_it(run):
    with contextlib.closing(open_folder(run)):
        assert command("--run", str(run), "--check").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--run", "/nowhere/toy"], 1, "/nowhere/toy holds no run"),
        ([], 2, "give --run DIR, or --database URL and --run-id ID"),
        (["--run", "x", "--steps", "5"], 2, "not a span of steps"),
        (["--run", "x", "--steps", "9:5"], 2, "there is no step in '9:5'"),
        (["--run", "x", "--steps", "5:5"], 2, "there is no step in '5:5'"),
        (["--run", __file__], 2, "is a file; give the run's folder"),
        (["--database", "mysql://x", "--run-id", "toy"], 2, "database must begin with postgresql://"),
    ],
)
def test_wrong_use_is_said_in_a_sentence(arguments, code, words):
    result = command(*arguments)
    assert (result.returncode, words in result.stderr) == (code, True), result.stderr
    assert "Traceback" not in result.stderr


def test_steps_that_the_run_has_not_made_are_refused(run):
    result = command("--run", str(run), "--steps", "200:210")
    assert (result.returncode, result.stdout) == (2, "")
    assert "no step in 200:210 is there: the run has committed steps 0:4" in result.stderr
