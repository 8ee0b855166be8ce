"""The benches run, check what they measure, and print what docs/benchmarks.md promises."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.bench import reduce_peers
from tests.bench.exchange_worker import MeanCheck, vector
from tests.bench.peer_environments import PeerFailed
from tests.bench.processes import BenchFailed, finish, workers
from tests.bench.reduce_case import WARM_UP, Case, check
from tests.bench.reduce_peers import Peer, run_peer
from tests.bench.reduce_rows import gloo_goal, rows_of
from tests.bench.report import row
from tests.support.coordinator import ROOT, environment

BENCH = ROOT / "tests" / "bench"
ROW = {"case", "ours", "peer", "theirs", "unit", "ratio", "goal", "met"}
TIMEOUT = 240.0
PLACE = {"hardware", "commit", "date", "arguments", "versions"}


def run_bench(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCH / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)


def printed(done: subprocess.CompletedProcess) -> dict:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result.keys() >= PLACE | {"rows"}
    assert all(line.keys() == ROW and line["ours"] > 0 and line["theirs"] > 0 for line in result["rows"])
    return result


MEMORY_ROWS = [("torch gloo", "ms"), ("torch gloo", "ms"), ("torch gloo", "s/GB"), ("numpy copy", "GB/s")]
SOCKET_ROWS = [
    *MEMORY_ROWS[:3],
    ("tcp loopback", "GB/s"),
    ("numpy copy", "GB/s"),
    ("tcp loopback", "s/GB"),
    ("bare gRPC, aio", "s/GB"),
    ("bare gRPC, threads", "s/GB"),
    ("bare gRPC, aio", "ms"),
    ("bare gRPC, threads", "ms"),
]


@pytest.mark.parametrize(
    ("count", "wire", "way", "least_error", "most_error", "rows"),
    [
        (2, "float32", "shm", 0.0, 1e-6, MEMORY_ROWS),
        (3, "bfloat16", "grpc", 2**-11, 2**-7, SOCKET_ROWS),
        (3, "bfloat16", "sharded", 2**-11, 2**-7, SOCKET_ROWS[:-4]),
        (3, "float32", "sharded shm", 0.0, 1e-6, MEMORY_ROWS),
        (2, "float32", "torch", 0.0, 1e-6, MEMORY_ROWS[:-1]),
    ],
)
def test_all_reduce_measures_right_means_and_prints_one_object(
    count: int, wire: str, way: str, least_error: float, most_error: float, rows: list[tuple[str, str]]
) -> None:
    topology, _, path = ("star", "", way) if way in ("shm", "grpc") else way.partition(" ")
    chosen = ("--topology", topology, "--path", path or "grpc")
    given = ("--workers", str(count), "--numel", "300001", "--repeat", "2", "--wire", wire, *chosen)
    done = run_bench("all_reduce.py", *given, "--peers", "none")
    result = printed(done)
    assert f"300,001 {wire} {way}, {count} workers" in done.stderr
    assert [(line["peer"], line["unit"]) for line in result["rows"]] == rows
    assert result["samples"].pop("not_measured") == {}
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workers", "1"),
        ("--numel", "-5"),
        ("--wire", "int4"),
        ("--path", "tcp"),
        ("--path", "shm", "--topology", "torch"),
        ("--topology", "torch", "--wire", "int8"),
    ],
)
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


def one_case(**changes: object) -> Case:
    values: dict = {"workers": 2, "numel": 250_000_000, "repeat": 3, "wire": "float32", "path": "grpc"}
    return Case(**(values | changes))


def test_a_repetition_takes_as_long_as_its_slowest_worker() -> None:
    def worker(seconds: list[float], cpu: float) -> dict:
        samples = {"seconds": seconds, "cpu_seconds": [cpu] * 3, "server_cpu_seconds": [0.5] * 3}
        names = ("ours", "gloo", "copy", "tcp", "grpc-aio", "grpc-threads")
        return {"samples": dict.fromkeys(names, samples), "commit_seconds": [0.25] * 3, "repeats": 4}

    rows = rows_of(one_case(), [worker([1.0, 2.0, 9.0], 0.5), worker([4.0, 1.0, 1.0], 1.5)])
    # Slowest of each repetition: 4, 2, 9 s. 1 GB for each worker, 4 GB through sockets, 2 s of the workers' processors
    # and half a second of whoever serves them.
    assert [(line["ours"], line["theirs"]) for line in rows] == [
        (4000, 4000),
        (4250, 4000),
        (1.25, 1.25),
        (1.0, 1.0),
        (1.0, 1.0),
        (0.625, 0.625),
        (0.625, 0.625),
        (0.625, 0.625),
        (4000, 4000),
        (4000, 4000),
    ]


def test_goals_are_those_of_the_way_and_the_length() -> None:
    assert gloo_goal(one_case(path="shm", numel=1_378_050)) == 0.6
    assert gloo_goal(one_case(path="shm")) == 0.5
    assert gloo_goal(one_case(path="shm", topology="sharded")) == 0.5
    assert gloo_goal(one_case()) == 2.2
    assert gloo_goal(one_case(wire="bfloat16")) is None
    assert gloo_goal(one_case(topology="sharded")) == 1.3
    assert gloo_goal(one_case(topology="sharded", wire="bfloat16")) == 0.9
    assert gloo_goal(one_case(topology="sharded", wire="int8")) is None
    assert gloo_goal(one_case(topology="torch")) is None


def test_of_a_vector_the_own_slice_does_not_travel_among_workers() -> None:
    assert one_case(workers=4).wire_bytes == 4 * 2e9
    assert one_case(workers=4, topology="sharded").wire_bytes == 3 * 2e9


def test_bytes_that_went_another_way_are_found() -> None:
    vectors = (WARM_UP + 3) * 4_000_000

    def result(sent_bytes: int, mean: str = "a") -> dict:
        return {"mean_sha256": mean, "traffic": {"sent_bytes": sent_bytes}}

    check(one_case(numel=1_000_000), [result(vectors)] * 2)
    check(one_case(numel=1_000_000, path="shm"), [result(500)] * 2)
    with pytest.raises(BenchFailed, match="500 bytes left over gRPC; of the vectors, 20,000,000 have to travel"):
        check(one_case(numel=1_000_000), [result(vectors), result(500)])
    with pytest.raises(BenchFailed, match="20,000,000 bytes left over gRPC"):
        check(one_case(numel=1_000_000, path="shm"), [result(vectors)])
    check(one_case(numel=1_000_000, topology="sharded"), [result(vectors // 2)] * 2)
    check(one_case(numel=1_000_000, topology="torch"), [result(0)] * 2)
    with pytest.raises(BenchFailed, match="10,000,000 have to travel"):
        check(one_case(numel=1_000_000, topology="torch"), [result(vectors // 2)] * 2)
    with pytest.raises(BenchFailed, match="different means"):
        check(one_case(), [result(0), result(0, "b")])


PEER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from tests.bench.reduce_line import arguments, take_turns
given = arguments().parse_args()
if not given.address:
    print("somewhere", flush=True)
    sys.stdin.read()
assert given.address == "somewhere"
number = iter(range(100))
def turn():
    return {"seconds": given.rank + next(number)} if given.numel == 5 else sys.exit("no such thing")
take_turns(given.turns, turn)
"""


def one_peer(tmp_path: Path) -> Peer:
    program = tmp_path / "peer.py"
    program.write_text(PEER.replace("sys.argv.pop(1)", repr(str(ROOT))))
    return Peer(name="peer", package="peer==1", program=str(program), what="turns", goal=0.1)


def test_all_processes_of_a_peer_take_the_turns_that_count(tmp_path: Path) -> None:
    said = run_peer(one_peer(tmp_path), Path(sys.executable), one_case(numel=5), tmp_path / "logs")
    assert said == [[{"seconds": rank + turn} for turn in range(WARM_UP, WARM_UP + 3)] for rank in range(2)]


def test_a_peer_that_fails_is_named_with_its_logs(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"peer 1, turns ended or got stuck\n(.*\n)*.*worker-0.log: no such thing"):
        run_peer(one_peer(tmp_path), Path(sys.executable), one_case(numel=6), tmp_path / "logs")


def test_a_lighthouse_is_looked_for_on_loopback() -> None:
    assert reduce_peers._reachable("http://some-machine:1234") == "http://127.0.0.1:1234"
    assert reduce_peers._reachable("/ip4/127.0.0.1/tcp/5") == "/ip4/127.0.0.1/tcp/5"


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
