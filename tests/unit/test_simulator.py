"""The simulator of large runs: its clock, its arithmetic, the costs it takes from measurements, and its answers."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest

from scripts import simulate, simulate_steps
from scripts.simulate_costs import KEPT, Case, fit, non_negative, predictions, processor_costs, read
from scripts.simulate_events import Clock, Gate, Host, Link, Process, Then
from scripts.simulate_report import TOLERANCE, demands, find
from scripts.simulate_scenario import CHUNK_BYTES, TOPOLOGIES, Bench, Costs, Scenario, Share
from scripts.simulate_topologies import simulate as simulated
from tests.bench.scale_fit import fit as fit_square

FREE = Costs(coordinator=Share(), worker=Share())
COSTS = Costs(
    coordinator=Share(step_s=3e-3, commit_s=0.6e-3, stream_s=1.2e-3, chunk_s=0.5e-3, byte_s=3e-9),
    worker=Share(commit_s=0.4e-3, stream_s=0.9e-3, chunk_s=0.3e-3, byte_s=2e-9),
    store_s=0.8e-3,
    hop_s=0.1e-3,
    beat_s=0.3e-3,
)
GBIT = 125e6
MODEL = 25_000_000


def times(clock: Clock) -> tuple[list[tuple[str, float]], Callable[[str], Then]]:
    """What has happened, and when; and what makes notes of it."""
    seen: list[tuple[str, float]] = []
    return seen, lambda name: lambda: seen.append((name, round(clock.now, 9)))


def test_a_process_does_one_thing_after_the_other_and_a_host_as_many_as_it_has_cores():
    clock = Clock()
    seen, note = times(clock)
    host = Host(clock, 2)
    first, second, third = (Process(host) for _ in range(3))
    for name, process in (("a", first), ("b", first), ("c", second), ("d", third)):
        process.work(1.0)(note(name))
    clock.run()
    # b waits for a's process, d for a core; d came before b's turn did.
    assert seen == [("a", 1.0), ("c", 1.0), ("d", 2.0), ("b", 2.0)]
    assert [process.busy_s for process in (first, second, third)] == [2.0, 1.0, 1.0]


def test_a_link_carries_in_order_and_latency_delays_nobody_else():
    clock = Clock()
    seen, note = times(clock)
    link = Link(clock, 100.0)
    link.carry(200, latency_s=5.0)(note("far"))
    link.carry(100)(note("near"))
    clock.run()
    assert seen == [("near", 3.0), ("far", 7.0)]
    assert link.busy_s == 3.0


def test_a_gate_opens_for_all_when_the_last_one_comes_and_stays_open():
    clock = Clock()
    seen, note = times(clock)
    gate = Gate(2)
    for name in ("a", "b"):
        gate.opened()(note(name))
    gate.come()
    assert not seen
    gate.come()
    gate.opened()(note("late"))
    assert [name for name, _ in seen] == ["a", "b", "late"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("inner", "seconds"), [(1, 2.0), (50, 100.0)])
def test_where_nothing_costs_anything_a_step_is_its_computing(topology, inner, seconds):
    scenario = Scenario(workers=5, elements=MODEL, topology=topology, compute_s=2.0, inner_steps=inner)
    assert simulated(scenario, FREE).step_s == pytest.approx(seconds)


def test_one_workers_step_is_the_sum_of_what_it_waits_for():
    scenario = Scenario(workers=1, elements=1000, link=1e6, coordinator_link=2e6, latency_s=0.01, compute_s=1.0)
    small_s, vector_s = 300 / 1e6 + 300 / 2e6, 4000 / 1e6 + 4000 / 2e6
    # Lease, begin, accepted, complete and commit; contribution and mean. The slower link takes the answer to the last
    # commit before the lease.
    links_s = 5 * small_s + 2 * vector_s + 300 / 1e6
    assert simulated(scenario, FREE).step_s == pytest.approx(1.0 + 7 * 0.01 + links_s, rel=1e-9)


@pytest.mark.parametrize("workers", [2, 8])
def test_links_bound_a_step_as_the_arithmetic_says(workers):
    star = Scenario(workers=workers, elements=MODEL, link=GBIT, coordinator_link=GBIT)
    vector_s = 4 * MODEL / GBIT
    # In and out go at the same time, but for the ends.
    assert simulated(star, FREE).step_s == pytest.approx(workers * vector_s, rel=0.03)
    sharded = replace(star, topology="sharded")
    assert simulated(sharded, FREE).step_s == pytest.approx(2 * vector_s * (workers - 1) / workers, rel=0.02)
    halved = replace(sharded, wire="bfloat16")
    assert simulated(halved, FREE).step_s == pytest.approx(vector_s * (workers - 1) / workers, rel=0.02)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_the_simulation_is_busy_for_as_long_as_the_sums_say(topology, wire):
    scenario = Scenario(
        workers=12,
        elements=MODEL,
        wire=wire,
        topology=topology,
        link=GBIT,
        coordinator_link=2 * GBIT,
        compute_s=0.5,
        buckets=3,
        beat_interval_s=1.0,
    )
    squared = replace(COSTS, coordinator=replace(COSTS.coordinator, commit_square_s=1e-5, stream_square_s=2e-5))
    busy_s = simulated(scenario, squared).busy_s
    for name, seconds in demands(scenario, squared).items():
        # A step's last answers are told during the next one. Small messages are left out of the sums but one.
        assert busy_s[name] == pytest.approx(seconds, rel=0.01, abs=2e-4), name


def test_buckets_that_are_ready_early_hide_their_exchange_behind_computing():
    alone = Scenario(workers=4, elements=MODEL, link=GBIT, coordinator_link=10 * GBIT, compute_s=2.0, buckets=10)
    hidden = replace(alone, overlap=1.0)
    exchange_s = simulated(alone, FREE).step_s - 2.0
    assert exchange_s > 0.8
    assert simulated(hidden, FREE).step_s - 2.0 < 0.2 * exchange_s
    # The sum over inner steps is there only after the last one.
    inner = [simulated(replace(one, inner_steps=3), FREE).step_s for one in (alone, hidden)]
    assert inner[0] == inner[1]


def test_workers_that_share_cores_wait_for_one_another():
    bench = Scenario(workers=8, elements=1, bench=Bench(cores=2, crews=2))
    crowded, roomy = (simulated(replace(bench, bench=Bench(cores=n, crews=2)), COSTS) for n in (1, 3))
    worked = crowded.busy_s["the coordinator's processor"] + crowded.workers_cpu_s
    assert crowded.step_s == pytest.approx(worked, rel=0.2)
    assert crowded.step_s >= worked
    assert roomy.step_s < 0.8 * crowded.step_s


def test_heartbeats_take_a_part_of_the_coordinators_time():
    scenario = Scenario(workers=50, elements=1)
    quiet, beating = (simulated(replace(scenario, beat_interval_s=s), COSTS) for s in (math.inf, 0.03))
    name = "the coordinator's processor"
    assert beating.busy_s[name] == pytest.approx(2 * quiet.busy_s[name])


@pytest.fixture
def coarse(monkeypatch):
    """Few pieces, for tests of many workers."""
    monkeypatch.setattr(simulate_steps, "MOST_PIECES", 800)


@pytest.mark.usefixtures("coarse")
def test_a_huge_model_and_many_workers_do_not_make_endless_events():
    scenario = Scenario(workers=100, elements=10**11, link=GBIT, coordinator_link=GBIT)
    assert scenario.in_bytes / CHUNK_BYTES * 100 > 10_000 * simulate_steps.MOST_PIECES
    # The star's link carries all vectors in, and out at the same time but for one piece of eight.
    assert simulated(scenario, FREE).step_s == pytest.approx(100 * scenario.in_bytes / GBIT * (1 + 1 / 8), rel=0.01)


def test_least_squares_without_negative_costs():
    rows = np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 1.0]])
    assert non_negative(rows, np.array([5.0, 3.0, 4.0, 8.0])) == pytest.approx([2.0, 1.0, 3.0])
    # The third cost would be -1 here: without it the others are those of the best line.
    assert non_negative(rows, np.array([1.0, 3.0, 4.0, 4.0])) == pytest.approx([1.5, 1.0, 0.0])


def made_up(costs: Costs, counts: tuple[int, ...] = (2, 4, 8)) -> list[Case]:
    bench = Bench(cores=2, crews=2)
    cases = []
    for workers in counts:
        for elements in (0, 1, 250_000, 2_000_000):
            outcome = simulated(Scenario(workers=workers, elements=elements, bench=bench), costs)
            cases.append(
                Case(
                    workers=workers,
                    elements=elements,
                    step_s=outcome.step_s,
                    coordinator_cpu_s=outcome.busy_s["the coordinator's processor"],
                    workers_cpu_s=outcome.workers_cpu_s,
                    bench=bench,
                )
            )
    return cases


def test_costs_are_found_again_from_what_they_lead_to():
    found = asdict(fit(made_up(COSTS), COSTS.beat_s))
    for side in ("coordinator", "worker"):
        assert found[side] == pytest.approx(asdict(COSTS)[side], rel=0.05, abs=1e-6)
    assert found["store_s"] == pytest.approx(COSTS.store_s, rel=0.1)
    assert found["hop_s"] == pytest.approx(COSTS.hop_s, rel=0.1)


def test_squares_are_found_where_there_are_many_workers():
    squared = replace(COSTS, coordinator=replace(COSTS.coordinator, stream_square_s=2e-5))
    found = processor_costs(made_up(squared, (2, 8, 16, 64))).coordinator
    assert found.stream_square_s == pytest.approx(2e-5, rel=0.1)
    assert found.commit_square_s < 2e-6


def test_too_few_cases_are_refused():
    with pytest.raises(ValueError, match="cases are too few to tell costs from"):
        fit(made_up(COSTS, (4, 8)), 0.0)


def test_the_small_cases_are_reproduced():
    """With a kept file of measurements. No cost was taken from those that are held out."""
    found = predictions(read(KEPT))
    held_out = [case for case, _ in found if case.is_held_out]
    assert len(held_out) >= 3
    assert {case.workers for case, _ in found} >= {2, 4, 8}
    errors = {(case.workers, case.elements): outcome.step_s / case.step_s - 1 for case, outcome in found}
    small = {key: round(error, 3) for key, error in errors.items() if key[0] <= 8}
    assert max(map(abs, small.values())) <= TOLERANCE, small


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(
    ("topology", "bound", "limit"), [("star", "the coordinator's link", 0), ("sharded", "a worker's link", 1)]
)
def test_what_bounds_a_large_run_and_where_it_saturates(topology, bound, limit):
    scenario = Scenario(
        workers=50, elements=10**9, topology=topology, link=GBIT, coordinator_link=GBIT, compute_s=1.0, buckets=4
    )
    found = find(scenario, COSTS)
    assert found.bound_by == bound
    assert found.efficiency < 0.1
    assert found.limits[bound] == limit, "a worker alone has no peers"
    enough = find(replace(scenario, inner_steps=found.inner_steps), COSTS)
    assert enough.efficiency == pytest.approx(0.9, abs=0.001)
    # One more than the limit is too many, one fewer is not.
    name = "the coordinator's processor"
    for workers, fits in ((found.limits[name], True), (found.limits[name] + 1, False)):
        assert (demands(replace(scenario, workers=workers), COSTS)[name] <= 1.0) is fits


QUESTION = ("--workers", "20", "--parameters", "1e9", "--link", "1Gbit", "--compute", "20s")


@pytest.mark.usefixtures("coarse")
def test_the_program_answers_in_words_and_in_json(capsys):
    assert simulate.main(QUESTION) == 0
    said = capsys.readouterr().out
    assert said.startswith("20 workers, 1,000,000,000 parameters as float32 (4 GB from each, 4 GB to each), 20 s of")
    [seconds] = re.findall(r"^star: a step takes (\d+) s, and computing is [\d.]+ % of it$", said, re.MULTILINE)
    assert float(seconds) == pytest.approx(20 + 20 * 32 * (1 + 1 / 40), rel=0.02)
    assert "  bound by   the coordinator's link\n" in said
    assert "  saturates  the coordinator's link from the first worker on\n" in said
    assert simulate.main((*QUESTION, "--json", "--topology", "sharded", "--wire", "bfloat16")) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [finding["topology"] for finding in answer["findings"]] == ["sharded"]
    assert answer["findings"][0]["busy"].keys() == answer["findings"][0]["limits"].keys()
    assert answer["scenario"]["link"] == GBIT
    assert {"workers", "elements", "error", "held_out"} <= answer["reproduced"][0].keys()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("--link", "fast", "is not a number above 0"),
        ("--link", "0Gbit", "is not a number above 0"),
        ("--workers", "0", "is not a whole number above 0"),
        ("--overlap", "2", "is not a number from 0 to 1"),
        ("--wire", "int4", "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(capsys, name, value, why):
    with pytest.raises(SystemExit) as ended:
        simulate.main((*QUESTION, name, value))
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", '{"samples": {"cases": []}}'])
def test_another_file_than_a_result_of_the_bench_is_refused(tmp_path, capsys, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert simulate.main((*QUESTION, "--calibration", str(path))) == 1
    assert f"simulate: {path}: " in capsys.readouterr().err


def test_a_square_is_told_from_a_line():
    counts = (2, 4, 8, 16, 32, 64, 128)
    line = [(n, 3e-3 + 2e-3 * n) for n in counts]
    wobbly = [(n, seconds * (1.04 if n % 3 == 1 else 0.97)) for n, seconds in line]
    square = [(n, seconds + 2e-5 * n * n) for n, seconds in wobbly]
    assert fit_square(wobbly)["verdict"].startswith("no quadratic term")
    assert fit_square(square)["verdict"].startswith("quadratic: ")
    assert fit_square(square)["square_s"] == pytest.approx(2e-5, rel=0.3)
    assert fit_square(line[:3]) == {"verdict": "too few workers (at most 8) to tell a square from a line"}
