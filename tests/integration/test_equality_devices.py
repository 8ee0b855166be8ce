"""The equality program's checks of mixed runs notice what they are there for."""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bench.equality import _backends
from tests.support.equality_cases import make_cases, updated_on_host
from tests.support.equality_checks import References, device_error, least_part, own_microbatches
from tests.support.equality_places import CPU, Place, capped, is_mixed
from tests.support.equality_reference import Microbatch, PlainRun
from tests.support.equality_runs import Run, WorkerRecord

GPU = Place(backend="wgpu")


def worker(backend: str, part: tuple[int, int], weights: list[int], terms: dict[int, float]) -> WorkerRecord:
    arrays = {f"term/{number}/a": np.array([value], np.float32) for number, value in terms.items()}
    steps = [{"step": 0, "rank": part[0], "microbatches": part, "weights": weights}]
    return WorkerRecord(name=backend, steps=steps, evaluation_loss=1.0, arrays=arrays, backend=backend)


def mixed(weights_of_gpu: list[int]) -> Run:
    # The GPU knows terms of all micro-batches, and was given the last two.
    gpu = worker("wgpu", (1, 3), weights_of_gpu, {0: 9.0, 1: 2.5, 2: 3.0})
    return Run(num_workers=2, workers=[worker("cpu", (0, 1), [4], {}), gpu], wall_s=0.0)


@pytest.fixture
def references() -> References:
    plain = PlainRun(losses=[], clipped_steps=0, gradient={}, parameters={}, evaluation_loss=0.0)
    terms = [Microbatch(gradient={"a": torch.tensor([value])}, weight=1) for value in (1.0, 2.0, 3.0)]
    return References(
        float32=plain, float64=plain, microbatches32=terms, microbatches64=terms, initial={"a": torch.zeros(1)}
    )


def test_sums_are_checked_against_what_each_device_computed(references: References):
    terms = own_microbatches(mixed([4, 4]), references)
    assert [float(term.gradient["a"]) for term in terms] == [1.0, 2.5, 3.0]
    assert device_error(mixed([4, 4]), references) == 0.25


def test_a_run_on_the_cpu_has_the_cpus_terms_only(references: References):
    run = Run(num_workers=1, workers=[worker("cpu", (0, 3), [4, 4, 4], {})], wall_s=0.0)
    assert not run.is_mixed
    assert own_microbatches(run, references) == references.microbatches32
    assert device_error(run, references) == 0.0


@pytest.mark.parametrize(("weights", "least"), [([4, 4], 1), ([], 0), ([0, 0], 0)])
def test_a_backend_that_had_no_part_in_a_step_is_noticed(weights: list[int], least: int):
    run = mixed(weights)
    assert run.is_mixed
    assert least_part(run) == least


def test_every_worker_of_a_mixed_crew_gets_micro_batches_however_slow_it_is(tmp_path: Path):
    for case in make_cases(tmp_path):
        total = case.run["batch"]["microbatches"]
        limits = [place.max_microbatches for place in capped((CPU, GPU), case)]
        assert all(0 < limit < total - 2 for limit in limits)
        assert sum(limits) >= total
        assert capped((CPU, CPU), case) == (CPU, CPU)


def test_updates_of_a_mixed_run_are_made_on_the_host(tmp_path: Path):
    for case in make_cases(tmp_path):
        host = updated_on_host(case)
        assert host.run["optimizer"] == {**case.run["optimizer"], "update": "host"}
        assert replace(host, run=case.run) == case


def test_which_backends_there_are():
    assert _backends("cpu,wgpu") == ["cpu", "wgpu"]
    assert is_mixed((CPU, GPU))
    with pytest.raises(argparse.ArgumentTypeError, match="'gpu' is none of"):
        _backends("cpu,gpu")
