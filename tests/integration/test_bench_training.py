"""The benches that time steps and training: what they make of what workers said, and that they run."""

import argparse
import cProfile
from pathlib import Path

import pytest

from tests.bench import empty_step, overlap, shaped, tokens
from tests.bench.processes import BenchFailed
from tests.bench.reduce_case import Case
from tests.integration.test_bench import printed, run_bench
from tests.unit.test_step_timeline import bucket


def test_an_empty_step_lasts_from_the_last_commit_to_the_last_commit() -> None:
    warm_up = [0.1 * step for step in range(empty_step.WARM_UP)]
    first, second = [*warm_up, 10.0, 11.0], [*warm_up, 10.5, 10.75]
    lengths = empty_step.step_ms([first, second])
    assert lengths == [pytest.approx((10.5 - warm_up[-1]) * 1e3), 500.0]


def test_rows_of_an_empty_step_have_the_goal_of_so_many_workers() -> None:
    result = {"step_ms": [3.0] * 98 + [5.0, 5.0], "health_check_ms": 0.5}
    goal, p50, p99 = empty_step.rows_of(8, result)
    assert (goal["ours"], goal["theirs"], goal["met"]) == (3.0, 4.0, True)
    assert (p50["ratio"], p99["ours"]) == (6.0, 5.0)
    assert [row["peer"] for row in empty_step.rows_of(3, result)] == ["one health check"] * 2


def test_a_breakdown_lists_what_took_most_time_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def busy() -> int:
        return sum(number * number for number in range(100_000))

    with cProfile.Profile() as profile:
        busy()
    profile.dump_stats(tmp_path / "profile")
    entries = empty_step.breakdown(tmp_path / "profile", 2, 10)
    assert len(entries) == 2
    assert "test_bench_training.py" in entries[0]["function"]
    assert entries[0]["calls"] == 10_000.1
    assert "genexpr" in capsys.readouterr().err


def test_empty_step_runs() -> None:
    result = printed(run_bench("empty_step.py", "--workers", "2", "--steps", "3"))
    assert len(result["rows"]) == 3
    assert len(result["samples"]["2 workers"]["step_ms"]) == 3


def test_what_is_not_hidden_is_a_share_of_the_exchange_alone() -> None:
    case = overlap.Case(workers=2, numel=100, layers=2, steps=2, path="grpc")
    # Two workers; the second one's mean comes 2 s after the end of computing in one step, 4 s in the other.
    quick = [[bucket(last=108.0)], [bucket(last=108.0)]]
    slow = [[bucket(last=112.0)], [bucket(last=114.0)]]
    assert overlap.exchange_of([quick, slow]) == 9.0
    rows, samples = overlap.rows_of(case, 2.0, 20.0, [quick, slow])
    assert (rows[0]["ours"], rows[0]["theirs"], rows[0]["met"]) == (0.15, 0.15, True)
    assert samples["hidden_share"] == pytest.approx(0.85)
    assert (rows[1]["ours"], rows[1]["theirs"]) == (9000.0, 20000)


def test_overlap_runs() -> None:
    result = printed(run_bench("overlap.py", "--numel", "40000", "--layers", "3", "--steps", "2"))
    assert all(len(lines) == 7 for lines in result["samples"]["last_step"])


def test_tokens_are_compared_by_the_slowest_worker_of_each_round() -> None:
    def turn(seconds: float, loss: float = 2.0) -> dict[str, float]:
        return {"seconds": seconds, "steps": 10, "tokens": 5000, "loss": loss}

    results: list[dict] = [
        {"ours": [turn(10.0), turn(12.0)], "ddp": [turn(9.0), turn(9.0)], "ddp_float16": [], "parameters": 5},
        {"ours": [turn(11.0), turn(10.0)], "ddp": [turn(9.0), turn(10.0)], "ddp_float16": [], "parameters": 5},
    ]
    given = argparse.Namespace(workers=2, path="shm", rate=0.0, topology="star", wire="float32")
    kilotoken, step = tokens.rows_of(given, results)
    assert (kilotoken["ours"], kilotoken["theirs"]) == (2300.0, 1900.0)
    assert (kilotoken["goal"], kilotoken["met"]) == (1.031, False)
    assert (step["ours"], step["theirs"]) == (1150.0, 950.0)
    links = {"workers": 2, "path": "grpc", "rate": 1000.0, "topology": "sharded"}
    assert tokens.rows_of(argparse.Namespace(**links, wire="float32"), results)[0]["goal"] == 1.0
    for result in results:
        result["ddp_float16"] = [turn(6.0), turn(7.0)]
    rounded, half, _ = tokens.rows_of(argparse.Namespace(**links, wire="bfloat16"), results)
    assert (rounded["goal"], half["goal"], half["theirs"]) == (None, None, 1300.0)
    tokens._check(results)
    results[1]["ddp"][1]["loss"] = 2.03
    with pytest.raises(BenchFailed, match=r"losses from 2.0000 to 2.0300"):
        tokens._check(results)


@pytest.mark.parametrize(("topology", "wire"), [("star", "float32"), ("sharded", "bfloat16"), ("torch", "float32")])
def test_tokens_runs(topology: str, wire: str) -> None:
    tiny = ("--width", "32", "--blocks", "1", "--context", "16", "--samples", "4", "--microbatches", "2")
    result = printed(
        run_bench("tokens.py", "--steps", "2", "--rounds", "1", "--topology", topology, "--wire", wire, *tiny)
    )
    workers = result["samples"]["workers"]
    assert [worker["ours"][0]["tokens"] for worker in workers] == [128, 128]
    assert [len(worker["ddp_float16"]) for worker in workers] == [int(wire != "float32")] * 2


def test_limits_of_links_are_arithmetic() -> None:
    case = Case(workers=4, numel=25_000_000, repeat=1, wire="bfloat16", path="grpc")
    samples = {"seconds": [2.0], "cpu_seconds": [1.0], "server_cpu_seconds": [1.0]}
    result = {"samples": dict.fromkeys(("ours", "gloo", "tcp"), samples), "repeats": 2}
    star, ring, gloo, stream = shaped.rows_of(case, 1000.0, [result] * 4)
    # 50 MB take 0.4 s on the link of a worker, four times that on the coordinator's.
    assert (star["theirs"], ring["theirs"]) == (1600.0, 600.0)
    assert (gloo["theirs"], stream["ours"], stream["theirs"]) == (2000.0, 0.1, 0.125)


@pytest.mark.parametrize(
    ("topology", "wire", "limit", "goal"),
    [
        ("sharded", "float32", 1200.0, 1.1),
        ("sharded", "bfloat16", 600.0, 1.1 * 1.15),
        ("torch", "float32", 1200.0, None),
    ],
)
def test_among_workers_every_link_carries_what_a_ring_does(
    topology: str, wire: str, limit: float, goal: float | None
) -> None:
    case = Case(workers=4, numel=25_000_000, repeat=1, wire=wire, path="grpc", topology=topology)
    samples = {name: {"seconds": [2.0]} for name in ("ours", "gloo", "tcp")}
    ring, gloo, _ = shaped.rows_of(case, 1000.0, [{"samples": samples, "repeats": 2}] * 4)
    assert (ring["theirs"], ring["goal"], gloo["theirs"], gloo["goal"]) == (limit, goal, 2000.0, None)
    assert topology in ring["case"]


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("empty_step.py", ("--workers", "two")),
        ("overlap.py", ("--layers", "0")),
        ("tokens.py", ("--microbatches", "3")),
        ("shaped.py", ("--workers", "1")),
    ],
)
def test_wrong_arguments_are_refused(program: str, arguments: tuple[str, str]) -> None:
    done = run_bench(program, *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr
    assert not done.stdout
