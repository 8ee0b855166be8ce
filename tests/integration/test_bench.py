"""The benches run, check what they measure, and print what docs/benchmarks.md promises."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.bench.all_reduce import Case, rows_of
from tests.bench.exchange_worker import MeanCheck, vector
from tests.bench.processes import BenchFailed, finish, workers
from tests.bench.report import row
from tests.support.coordinator import ROOT, environment

BENCH = ROOT / "tests" / "bench"
ROW = {"case", "ours", "peer", "theirs", "unit", "ratio", "goal", "met"}
PLACE = {"hardware", "commit", "date", "arguments", "versions"}


def run_bench(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCH / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment(), check=False)


def printed(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result.keys() >= PLACE | {"rows"}
    assert all(line.keys() == ROW and line["ours"] > 0 and line["theirs"] > 0 for line in result["rows"])
    return result


@pytest.mark.parametrize(
    ("count", "wire", "least_error", "most_error"), [(2, "float32", 0.0, 1e-6), (3, "bfloat16", 2**-11, 2**-7)]
)
def test_all_reduce_measures_right_means_and_prints_one_object(
    count: int, wire: str, least_error: float, most_error: float
) -> None:
    given = ("--workers", str(count), "--numel", "300001", "--repeat", "2", "--wire", wire)
    done = run_bench("all_reduce.py", *given)
    result = printed(done)
    assert f"300,001 {wire}, {count} workers" in done.stderr
    assert [(line["peer"], line["unit"]) for line in result["rows"]] == [
        ("torch gloo", "ms"),
        ("torch gloo", "ms"),
        ("tcp loopback", "GB/s"),
        ("numpy copy", "GB/s"),
        ("torch gloo", "s/GB"),
        ("tcp loopback", "s/GB"),
    ]
    (samples,) = result["samples"].values()
    assert len({worker["mean_sha256"] for worker in samples}) == 1
    assert all(least_error <= worker["max_error"] <= most_error for worker in samples)
    assert all(len(worker["samples"]["ours"]["seconds"]) == 2 for worker in samples)


def test_memory_is_bounded_by_the_window() -> None:
    result = printed(run_bench("memory.py", "--workers", "2", "--numel", "12000000"))
    reducer, process = result["rows"]
    assert reducer["met"]
    assert process["met"]
    # The delayed worker made the other one fill its window: otherwise nothing was put to the test.
    assert reducer["ours"] >= 4 << 20


@pytest.mark.parametrize("arguments", [("--workers", "1"), ("--numel", "-5"), ("--wire", "int8")])
def test_wrong_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    done = run_bench("all_reduce.py", *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr
    assert not done.stdout


def test_a_wrong_mean_is_found() -> None:
    check = MeanCheck(2, 100)
    mean = (vector(0, 100) + vector(1, 100)) / np.float32(2)
    check(mean, 1e-6)
    for wrong in (mean[50] * np.float32(1.00001), np.nan):
        spoilt = mean.copy()
        spoilt[50] = wrong
        with pytest.raises(AssertionError, match="the mean is off by"):
            check(spoilt, 1e-6)


def test_a_failed_worker_is_named_with_its_log(tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text("import sys; sys.exit('no such thing' if sys.argv[1] == '1' else 0)")
    with (
        workers(program, [["0"], ["1"]], tmp_path) as started,
        pytest.raises(BenchFailed, match="worker 1 ended with exit code 1:\nno such thing"),
    ):
        finish(started, 60)


def test_a_repetition_takes_as_long_as_its_slowest_worker() -> None:
    def worker(seconds: list[float], cpu: float) -> dict:
        samples = {"seconds": seconds, "cpu_seconds": [cpu] * 3, "coordinator_cpu_seconds": [0.5] * 3}
        return {
            "samples": dict.fromkeys(("ours", "gloo", "copy", "tcp"), samples),
            "commit_seconds": [0.25] * 3,
            "repeats": 4,
        }

    case = Case(workers=2, numel=250_000_000, repeat=3, wire="float32")
    rows = rows_of(case, [worker([1.0, 2.0, 9.0], 0.5), worker([4.0, 1.0, 1.0], 1.5)])
    # Slowest of each repetition: 4, 2, 9 s. 1 GB for each worker, 4 GB through sockets, 2 s of the workers' processors.
    assert [(line["ours"], line["theirs"]) for line in rows] == [
        (4000, 4000),
        (4250, 4000),
        (1.0, 1.0),
        (1.0, 1.0),
        (1.25, 1.0),
        (0.625, 0.5),
    ]


@pytest.mark.parametrize(("goal", "met"), [(None, None), (0.5, True), (0.4, False)])
def test_a_goal_is_what_the_ratio_may_be_at_most(goal: float | None, met: bool | None) -> None:
    assert row("case", 1.0, "peer", 2.0, "ms", goal) == {
        "case": "case",
        "ours": 1.0,
        "peer": "peer",
        "theirs": 2.0,
        "unit": "ms",
        "ratio": 0.5,
        "goal": goal,
        "met": met,
    }
