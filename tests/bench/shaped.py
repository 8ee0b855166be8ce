"""Measures an all-reduce between machines with slow links: network namespaces, 1 Gbit/s each way.

    python tests/bench/shaped.py [--workers 4] [--numel 25000000] [--rate 1000] [--repeat 5] [--topology star] [--keep]

Every worker and the coordinator has a namespace and a link of its own. Gloo's ring and one TCP stream take turns with
ours on the same links. The limits are arithmetic: what the busiest link carries one way, over its rate. Needs root and
iproute2. Prints one JSON object to standard output and progress to standard error; docs/benchmarks.md says how to
read it.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ayni.tensors import WIRE_DTYPES
from tests.bench import links, processes, report
from tests.bench.links import Place
from tests.bench.processes import BenchFailed
from tests.bench.reduce_case import PROGRAM, TOPOLOGIES, WARM_UP, Case, check
from tests.bench.reduce_rows import seconds_of

WIRES = tuple(wire for wire in ("float32", "bfloat16", "int8") if wire in WIRE_DTYPES)
CONTENDERS = ("ours", "gloo", "tcp")
TIMEOUT = 1200.0
KINDS = (*(("star", wire) for wire in WIRES), *(("sharded", wire) for wire in WIRES), ("torch", "float32"))
"""Topologies and element types; torch's own way is float32 only."""
_GOAL, _TOLERANCE = 1.1, 1.15
"""Of a sharded exchange in float32 against its wire limit; and how far another type may be from its share of that."""


def main() -> int:
    given, measured_on = _arguments(), report.hardware()
    rows, samples = [], {}
    try:
        with links.places(given.workers + 1, given.rate) as places:
            for topology, wire in KINDS:
                if given.topology not in ("", topology):
                    continue
                case = Case(
                    workers=given.workers,
                    numel=given.numel,
                    repeat=given.repeat,
                    wire=wire,
                    path="grpc",
                    topology=topology,
                )
                results = measure(case, places)
                samples[str(case)] = results
                rows += rows_of(case, given.rate, results)
    except BenchFailed as error:
        print(f"shaped: {error}", file=sys.stderr)
        return 1
    result = report.report("shaped", rows, vars(given), samples, measured_on)
    if given.keep:
        print(f"kept in {report.keep(result)}", file=sys.stderr)
    print(json.dumps(result))
    return 0


def measure(case: Case, places: list[Place]) -> list[dict]:
    """What each worker printed; the coordinator is in the first place.

    Raises:
        BenchFailed: a worker failed, or two hold different means.
    """
    print(f"{case}: {WARM_UP} + {case.repeat} repetitions", file=sys.stderr)
    centre, *own = places
    listen = ("--listen", f"{centre.address}:0", "--insecure")
    with (
        tempfile.TemporaryDirectory() as name,
        processes.coordinator(Path(name), case.run, *listen, prefix=centre.prefix) as served,
    ):
        flags = {
            "--coordinator": served.word(),
            "--coordinator-pid": served.pid,
            "--store": Path(name) / "store",
            "--workers": case.workers,
            "--numel": case.numel,
            "--warm-up": WARM_UP,
            "--repeat": case.repeat,
            "--wire": case.wire,
            "--path": case.path,
            "--topology": case.topology,
            "--contenders": ",".join(CONTENDERS),
        }
        shared = [*(str(word) for pair in flags.items() for word in pair), "--insecure"]
        arguments = [[*shared, "--rank", str(rank), "--host", place.address] for rank, place in enumerate(own)]
        prefixes = [place.prefix for place in own]
        device = own[0].device
        with processes.workers(PROGRAM, arguments, Path(name), prefixes, GLOO_SOCKET_IFNAME=device) as started:
            results = processes.finish(started, TIMEOUT)
    check(case, results)
    return results


def rows_of(case: Case, rate_mbit: float, results: list[dict]) -> list[dict]:
    """Rows about one case; V is the bytes of a vector as it travels. A star's busiest link is the coordinator's."""
    rate, longest = rate_mbit * 1e6 / 8, max(case.up_bytes, case.down_bytes)
    ours, gloo = seconds_of(results, "ours"), seconds_of(results, "gloo")
    star = case.workers * longest / rate
    ring = (case.workers - 1) / case.workers * (case.up_bytes + case.down_bytes) / rate
    name = f"all-reduce of {case}, {rate_mbit:g} Mbit/s, {case.topology}"
    goal = None if case.topology != "sharded" else _GOAL * (1.0 if case.wire == "float32" else _TOLERANCE)
    stream = case.numel * 4 * results[0]["repeats"] / 1e9 / seconds_of(results, "tcp")
    return [
        *(
            [report.row(name, ours * 1e3, "wire limit of a star, N V", star * 1e3, "ms")]
            if case.topology == "star"
            else []
        ),
        report.row(name, ours * 1e3, "wire limit 2V(N-1)/N", ring * 1e3, "ms", goal),
        report.row(name, ours * 1e3, "torch gloo, float32", gloo * 1e3, "ms"),
        report.row(f"one TCP stream, {rate_mbit:g} Mbit/s", stream, "rate of the link", rate / 1e9, "GB/s"),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="worker processes, 2 or more")
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the vector")
    parser.add_argument("--rate", type=float, default=1000.0, help="megabits a second, each way, of each link")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions that count")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="", help="who reduces (default: each)")
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    given = parser.parse_args()
    if given.workers < 2 or min(given.numel, given.repeat) < 1 or given.rate <= 0:
        parser.error("--workers must be at least 2, --numel and --repeat at least 1, --rate above 0")
    return given


if __name__ == "__main__":
    sys.exit(main())
