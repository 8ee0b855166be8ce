"""The equality program holds for few steps, and its checks notice what they are there for."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.support.coordinator import ROOT, environment
from tests.support.equality_checks import (
    largest_skew,
    relative_error,
    same_commits,
    same_gradients,
    same_parameters,
    sum_error,
    unequal_shares,
)
from tests.support.equality_reference import Microbatch
from tests.support.equality_runs import Run, WorkerRecord

PROGRAM = str(ROOT / "tests" / "bench" / "equality.py")


@pytest.mark.timeout(300)
def test_runs_of_1_2_and_3_workers_are_equal():
    command = [sys.executable, PROGRAM, "--workers", "1", "2", "3", "--steps", "6"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=280)
    assert ended.returncode == 0, f"{ended.stderr}\n{ended.stdout}"
    result = json.loads(ended.stdout)
    assert result["ok"]
    assert result["gradient_bytes_equal"]
    assert result["parameter_bytes_equal"]
    assert 0 < result["max_rel_err_float64"] <= 1e-6
    assert result["max_loss_diff"] <= 1e-4
    assert [case["name"] for case in result["cases"] if case["kind"] == "run"] == ["causal_lm", "flat_lora"]
    assert sum(case["kind"] == "counter_example" for case in result["cases"]) == 6


def make_run(shares: list[int]) -> Run:
    """A run of two steps, in which all workers hold the same."""
    bounds = np.cumsum([0, *shares]).tolist()

    def step(number: int, rank: int) -> dict:
        return {
            "step": number,
            "rank": rank,
            "microbatches": (bounds[rank], bounds[rank + 1]),
            "means": {"block 0": f"mean {number}", "lm_head": f"other {number}"},
            "parameters": f"parameters {number}",
            "commit": {"step": number, "attempt": 0, "global_loss": 0.5},
        }

    workers = [
        WorkerRecord(name=f"w{rank}", steps=[step(0, rank), step(1, rank)], evaluation_loss=1.0, arrays={})
        for rank in range(len(shares))
    ]
    return Run(num_workers=len(shares), workers=workers, wall_s=0.0)


@pytest.fixture
def runs() -> list[Run]:
    return [make_run([4]), make_run([1, 3])]


def test_equal_runs_are_equal(runs):
    assert same_gradients(runs) == (True, 12)
    assert same_parameters(runs) == (True, 6)
    assert same_commits(runs)


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("step", [0, 1])
def test_one_other_mean_parameter_or_commit_is_noticed(runs, worker, step):
    changed = copy.deepcopy(runs)
    changed[1].workers[worker].steps[step]["means"]["lm_head"] = "another"
    assert not same_gradients(changed)[0]
    assert same_parameters(changed)[0]
    changed = copy.deepcopy(runs)
    changed[1].workers[worker].steps[step]["parameters"] = "another"
    assert not same_parameters(changed)[0]
    changed = copy.deepcopy(runs)
    changed[1].workers[worker].steps[step]["commit"]["global_loss"] = np.nextafter(0.5, 1)
    assert not same_commits(changed)


def test_missing_bucket_or_parameters_are_noticed(runs):
    del runs[1].workers[0].steps[1]["means"]["lm_head"]
    assert not same_gradients(runs)[0]
    for worker in (worker for run in runs for worker in run.workers):
        worker.steps[1]["parameters"] = ""
    assert not same_parameters(runs)[0]


@pytest.mark.parametrize(("shares", "unequal"), [([4, 4, 4], False), ([4, 3, 4], True), ([5, 0, 4], True)])
def test_unequal_shares(shares, unequal):
    assert unequal_shares(make_run(shares)) == unequal
    assert largest_skew(make_run(shares)) == max(shares) - min(shares)


def test_error_is_relative_to_the_element_above_the_floor():
    reference = {"a": torch.tensor([4.0, 0.5]), "b": torch.tensor([0.0])}
    values = {"a": torch.tensor([4.5, 0.5]), "b": torch.tensor([0.0])}
    floors = {"a": torch.tensor(2.0), "b": torch.tensor(0.0)}
    assert relative_error(values, reference, floors) == 0.5 / 4
    assert relative_error({**values, "a": torch.tensor([4.0, 1.0])}, reference, floors) == 0.5 / 2
    assert relative_error({**values, "b": torch.tensor([1e-30])}, reference, floors) == float("inf")


def test_sum_error_sees_one_part_in_a_million_of_the_smallest_element():
    microbatches = [
        Microbatch(gradient={"a": torch.tensor([1.0, 1e-6])}, weight=1),
        Microbatch(gradient={"a": torch.tensor([2.0, 3e-6])}, weight=2),
    ]
    assert sum_error({"a": torch.tensor([1.0, 4e-6 / 3])}, microbatches) < 1e-7
    assert sum_error({"a": torch.tensor([1.0, 4e-6 / 3 * (1 + 4e-6)])}, microbatches) > 1e-6
