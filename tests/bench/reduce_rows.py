"""What the all-reduce bench says about a case. A repetition took as long as its slowest worker."""

from collections.abc import Iterator
from statistics import median

from tests.bench import report
from tests.bench.bare_grpc import KINDS
from tests.bench.reduce_case import Case

_LARGE = 10_000_000
_SHARDED_GOALS = {"float32": 1.3, "bfloat16": 0.9}
"""Of an exchange among workers, for each element type, against Gloo's in the same processes."""
_CPU_GOAL = 1.3
"""Of a star over gRPC, against bare gRPC that moves the same bytes."""


def gloo_goal(case: Case) -> float | None:
    """What the time of an all-reduce may be, of Gloo's in the same processes."""
    if case.topology == "torch":
        return None
    if case.topology == "sharded" and case.path == "grpc":
        return _SHARDED_GOALS.get(case.wire)
    if case.wire != "float32":
        # The goal of fewer bytes is the sharded exchange's.
        return None
    if case.path == "grpc":
        return 2.2
    return 0.5 if case.numel >= _LARGE else 0.6


def rows_of(case: Case, results: list[dict]) -> list[dict]:
    """Rows about one case."""
    ours, gloo = seconds_of(results, "ours"), seconds_of(results, "gloo")
    with_commit = ours + commit_seconds(results)
    gradient_gb = case.workers * case.numel * 4 / 1e9
    return [
        report.row(f"all-reduce of {case}", ours * 1e3, "torch gloo", gloo * 1e3, "ms", gloo_goal(case)),
        report.row(f"all-reduce and commit of {case}", with_commit * 1e3, "torch gloo", gloo * 1e3, "ms"),
        report.row(
            f"processor time per GB of gradients, {case}",
            cpu_of(results, "ours") / gradient_gb,
            "torch gloo",
            cpu_of(results, "gloo") / gradient_gb,
            "s/GB",
        ),
        *_way_rows(case, results),
    ]


def seconds_of(results: list[dict], name: str) -> float:
    """Median time of a contender's repetitions."""
    return median(max(seconds) for seconds in _repetitions(results, name, "seconds"))


def commit_seconds(results: list[dict]) -> float:
    """Median time of our commits."""
    commits = zip(*(result["commit_seconds"] for result in results), strict=True)
    return median(max(seconds) for seconds in commits)


def cpu_of(results: list[dict], name: str) -> float:
    """Median processor time of a contender's repetitions: of all workers, and of the process that serves them."""
    workers = [sum(seconds) for seconds in _repetitions(results, name, "cpu_seconds")]
    server = results[0]["samples"][name]["server_cpu_seconds"]
    return median(worker + its for worker, its in zip(workers, server, strict=True))


def _way_rows(case: Case, results: list[dict]) -> list[dict]:
    """Rows about the way that a case's bytes go."""
    if case.topology == "torch":
        # The bytes are torch's own.
        return []
    if case.path == "shm":
        return _memory_rows(case, results)
    return _socket_rows(case, results) + (_bare_rows(case, results) if case.topology == "star" else [])


def _socket_rows(case: Case, results: list[dict]) -> list[dict]:
    ours, gb = seconds_of(results, "ours"), case.wire_bytes / 1e9
    repeated_gb = _repeated_gb(case, results)
    tcp, copy = (repeated_gb / seconds_of(results, name) for name in ("tcp", "copy"))
    cpu = cpu_of(results, "ours") / gb
    what = f"processor time per GB through sockets, {case}"
    return [
        report.row(f"bytes through sockets, {case}", gb / ours, "tcp loopback", tcp, "GB/s"),
        report.row(f"bytes through sockets, {case}", gb / ours, "numpy copy", copy, "GB/s"),
        report.row(what, cpu, "tcp loopback", cpu_of(results, "tcp") / repeated_gb, "s/GB"),
    ]


def _bare_rows(case: Case, results: list[dict]) -> list[dict]:
    ours, gb = seconds_of(results, "ours"), case.wire_bytes / 1e9
    cpu = cpu_of(results, "ours") / gb
    what = f"processor time per GB through sockets, {case}"
    return [
        *(
            report.row(what, cpu, _bare(kind), cpu_of(results, f"grpc-{kind}") / gb, "s/GB", _CPU_GOAL)
            for kind in KINDS
        ),
        *(
            report.row(
                f"all-reduce of {case}", ours * 1e3, _bare(kind), seconds_of(results, f"grpc-{kind}") * 1e3, "ms"
            )
            for kind in KINDS
        ),
    ]


def _memory_rows(case: Case, results: list[dict]) -> list[dict]:
    gb = case.wire_bytes / 1e9
    copy = _repeated_gb(case, results) / seconds_of(results, "copy")
    return [report.row(f"bytes through memory, {case}", gb / seconds_of(results, "ours"), "numpy copy", copy, "GB/s")]


def _bare(kind: str) -> str:
    return f"bare gRPC, {kind}"


def _repeated_gb(case: Case, results: list[dict]) -> float:
    return case.numel * 4 * results[0]["repeats"] / 1e9


def _repetitions(results: list[dict], name: str, value: str) -> Iterator[tuple[float, ...]]:
    """Yields the workers' values of each repetition."""
    return zip(*(result["samples"][name][value] for result in results), strict=True)
