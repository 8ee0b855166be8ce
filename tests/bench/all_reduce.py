"""Measures our all-reduce against Gloo's on the same processes, a copy, a bare socket, bare gRPC, and other programs.

    python tests/bench/all_reduce.py --workers 2 --numel 1378050 [--repeat 20] [--topology star] [--path shm]
        [--wire float32] [--keep]

Without --workers and --numel it measures 1,378,050 and 25,000,000 elements with 2 and 4 workers; without --topology,
--path and --wire a star and sharded, each in float32 through shared memory and in float32 and bfloat16 over gRPC, and
torch. torchft, Hivemind and Flower average the smaller vector, each in an environment of its own below --cache-dir.
Prints one JSON object to standard output and progress to standard error; docs/benchmarks.md says how to read it.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ayni.tensors import WIRE_DTYPES
from tests.bench import report
from tests.bench.peer_environments import CACHE, PeerFailed, environment_of
from tests.bench.processes import BenchFailed
from tests.bench.reduce_case import PATHS, TOPOLOGIES, Case, measure
from tests.bench.reduce_peers import PEERS, Peer, run_peer
from tests.bench.reduce_rows import commit_seconds, rows_of, seconds_of

WORKERS, NUMELS = (2, 4), (1_378_050, 25_000_000)
KINDS = (
    ("star", "shm", "float32"),
    ("sharded", "shm", "float32"),
    ("star", "grpc", "float32"),
    ("star", "grpc", "bfloat16"),
    ("sharded", "grpc", "float32"),
    ("sharded", "grpc", "bfloat16"),
    ("torch", "grpc", "float32"),
)
"""Topologies, ways and element types that are measured unless one is asked for."""


@dataclass
class Results:
    """What was found so far."""

    rows: list[dict] = field(default_factory=list)
    samples: dict = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)


def main() -> int:
    given, measured_on = _arguments(), report.hardware()
    results = Results()
    try:
        _measure_all(given, results)
    except BenchFailed as error:
        print(f"all_reduce: {error}", file=sys.stderr)
        return 1
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    samples = {**results.samples, "not_measured": results.not_measured}
    result = report.report("all_reduce", results.rows, arguments, samples, measured_on)
    if given.keep:
        print(f"kept in {report.keep(result)}", file=sys.stderr)
    print(json.dumps(result))
    return 0


def _measure_all(given: argparse.Namespace, results: Results) -> None:
    compared: dict[tuple[int, int], list[tuple[Case, list[dict]]]] = {}
    for case in _cases(given):
        measured = measure(case)
        results.rows += rows_of(case, measured)
        results.samples[str(case)] = measured
        found = compared.setdefault((case.workers, case.numel), [])
        # The others share no memory; ours do where they can.
        if case.wire == "float32" and (case.path == "shm" or not found):
            found.append((case, measured))
    for (_, numel), ours in compared.items():
        if numel == (given.numel or NUMELS[0]) and ours:
            _measure_peers(given, ours, results)


def _measure_peers(given: argparse.Namespace, ours: Sequence[tuple[Case, list[dict]]], results: Results) -> None:
    """Has the others average what ours did."""
    case = ours[0][0]
    for peer in (peer for peer in PEERS if peer.name in given.peers):
        label = f"{peer.label}, {case.workers} workers"
        try:
            python = environment_of(peer.package, given.cache_dir, peer.others)
            with tempfile.TemporaryDirectory() as name:
                theirs = run_peer(peer, python, case, Path(name) / peer.name)
        except PeerFailed as error:
            print(f"all_reduce: {error}", file=sys.stderr)
            results.not_measured[label] = str(error)
            continue
        results.samples[label] = theirs
        results.rows += [_peer_row(peer, own, measured, theirs) for own, measured in ours]


def _peer_row(peer: Peer, case: Case, ours: list[dict], theirs: list[list[dict]]) -> dict:
    seconds = median(max(said["seconds"] for said in turn) for turn in zip(*theirs, strict=True))
    own = seconds_of(ours, "ours") + (commit_seconds(ours) if peer.with_control else 0.0)
    what = "all-reduce and commit" if peer.with_control else "all-reduce"
    return report.row(f"{what} of {case}", own * 1e3, peer.label, seconds * 1e3, "ms", peer.goal)


def _cases(given: argparse.Namespace) -> Iterator[Case]:
    asked = (given.topology, given.path, given.wire)
    kinds = [kind for kind in KINDS if all(one in ("", its) for one, its in zip(asked, kind, strict=True))]
    if not kinds:
        kinds = [(given.topology or "star", given.path or "grpc", given.wire)]
    for numel in [given.numel] if given.numel else NUMELS:
        for workers in [given.workers] if given.workers else WORKERS:
            for topology, path, wire in kinds:
                repeat = given.repeat or (20 if numel < 10_000_000 else 8)
                yield Case(workers=workers, numel=numel, repeat=repeat, wire=wire, path=path, topology=topology)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0, help="worker processes, 2 or more (default: 2, then 4)")
    parser.add_argument("--numel", type=int, default=0, help="elements of the vector (default: 1378050, then 25000000)")
    parser.add_argument("--repeat", type=int, default=0, help="repetitions that count (default: by size)")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="", help="who reduces (default: each)")
    parser.add_argument("--path", choices=PATHS, default="", help="how our gradients travel (default: both)")
    parser.add_argument("--wire", choices=WIRE_DTYPES, default="", help="element type on our wire (default: two)")
    names = ",".join(peer.name for peer in PEERS)
    parser.add_argument("--peers", default=names, help=f"others, with commas; none: nobody (default: {names})")
    parser.add_argument("--cache-dir", type=Path, default=CACHE, help="folder of the others' environments")
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    given = parser.parse_args()
    if given.workers == 1 or min(given.workers, given.numel, given.repeat) < 0:
        parser.error("--workers must be at least 2, --numel and --repeat at least 1")
    if given.topology == "torch" and given.path == "shm":
        parser.error("--path shm goes with --topology star and sharded only")
    if given.topology == "torch" and given.wire not in ("", "float32"):
        parser.error("--topology torch goes with --wire float32 only")
    given.peers = given.peers.split(",")
    return given


if __name__ == "__main__":
    sys.exit(main())
