"""Measures tokens/s of the causal_lm task by our workers, against DDP over Gloo in the same processes.

    python tests/bench/tokens.py [--workers 2] [--steps 20] [--rounds 3] [--rate 1000] [--path shm] [--topology star]
        [--wire float32] [--keep]

Each worker process trains the same model on the same samples, in turn: --steps steps as a worker of a run of ours, as
many under torch's DistributedDataParallel, for --rounds times. Both must come to the same loss. With --rate every
worker and the coordinator has a link of its own with so many megabits a second each way (needs root and iproute2).
With another --wire than float32 DDP trains a second time, with its hook that sends float16 (Gloo has none for
bfloat16); the goal is for float32 on both sides.
Prints one JSON object to standard output and progress to standard error; docs/benchmarks.md says how to read it.
"""

import argparse
import json
import math
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ayni.tensors import WIRE_DTYPES
from tests.bench import links, processes, report
from tests.bench.processes import BenchFailed
from tests.bench.reduce_case import TOPOLOGIES

PROGRAM = Path(__file__).with_name("tokens_worker.py")
WARM_UP = 3
"""Steps of each round that don't count."""
GOALS = {False: 0.97, True: 1.0}
"""Least tokens/s of DDP's, on one host and over links."""
LOSS_TOLERANCE = 0.01
TIMEOUT = 1800.0


def main() -> int:
    given, measured_on = _arguments(), report.hardware()
    try:
        results = measure(given)
    except BenchFailed as error:
        print(f"tokens: {error}", file=sys.stderr)
        return 1
    result = report.report("tokens", rows_of(given, results), vars(given), {"workers": results}, measured_on)
    if given.keep:
        print(f"kept in {report.keep(result)}", file=sys.stderr)
    print(json.dumps(result))
    return 0


def measure(given: argparse.Namespace) -> list[dict]:
    """What each worker printed.

    Raises:
        BenchFailed: a worker failed, or the two came to different losses.
    """
    print(f"{given.workers} workers: {given.rounds} rounds of {WARM_UP} + {given.steps} steps", file=sys.stderr)
    run = run_of(given)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefixes, hosts, listen, interface = _links(given, stack)
        centre, *own = prefixes
        served = [
            stack.enter_context(processes.coordinator(folder / f"round-{number}", run, *listen, prefix=centre))
            for number in range(given.rounds)
        ]
        flags = {
            "--coordinators": ",".join(each.word() for each in served),
            "--run": json.dumps(run),
            "--store": folder / "store",
            "--text": _text(folder, given.context),
            "--workers": given.workers,
            "--warm-up": WARM_UP,
            "--path": given.path,
            "--topology": given.topology,
            "--wire": given.wire,
        }
        shared = [*(str(word) for pair in flags.items() for word in pair), *(["--insecure"] if given.rate else [])]
        arguments = [[*shared, "--rank", str(rank), "--host", hosts[rank]] for rank in range(given.workers)]
        started = stack.enter_context(processes.workers(PROGRAM, arguments, folder, own, GLOO_SOCKET_IFNAME=interface))
        results = processes.finish(started, TIMEOUT)
    _check(results)
    return results


def run_of(given: argparse.Namespace) -> dict:
    """The run file."""
    return {
        "run_id": "bench",
        "min_workers": given.workers,
        "topology": given.topology,
        "wire_type": given.wire,
        "num_steps": WARM_UP + given.steps,
        "batch": {"samples": given.samples, "microbatches": given.microbatches},
        "optimizer": {"schedule": "constant", "learning_rate": 1e-3},
        "audit_every": 0,
        "task": {
            "name": "causal_lm",
            "options": {
                "width": given.width,
                "inner_width": given.width * 11 // 4,
                "num_blocks": given.blocks,
                "context": given.context,
                "held_out_fraction": 0.0,
            },
        },
    }


def rows_of(given: argparse.Namespace, results: list[dict]) -> list[dict]:
    """Time of a thousand tokens, less is better: the median over all rounds, of each round's slowest worker."""
    link = f", {given.rate:g} Mbit/s" if given.rate else ""
    shape = "" if given.topology == "star" else f" {given.topology}"
    wire = "" if given.wire == "float32" else f" {given.wire}"
    what = f"{results[0]['parameters']:,} parameters, {given.workers} workers,{shape} {given.path}{wire}{link}"
    goal = None if wire else 1 / GOALS[bool(given.rate)]
    peers = {"ddp": ("DDP + Gloo", goal), "ddp_float16": ("DDP + Gloo, float16 hook", None)}
    rows = []
    for name, (peer, limit) in peers.items():
        if results[0][name]:
            ours, theirs = (_ms_per_kilotoken(results, each) for each in ("ours", name))
            rows.append(report.row(f"1,000 tokens of causal_lm, {what}", ours, peer, theirs, "ms", limit))
    steps = _step_ms(results, "ours"), _step_ms(results, "ddp")
    return [*rows, report.row(f"step of causal_lm, {what}", steps[0], "DDP + Gloo", steps[1], "ms")]


def _text(folder: Path, context: int) -> Path:
    """Writes a text of whole windows: DDP takes a mean of means, which is another where windows differ in length."""
    text = (PROGRAM.parents[2] / "LICENSE").read_bytes()
    path = folder / "train.txt"
    path.write_bytes(text[: (len(text) - 1) // context * context + 1])
    return path


def _ms_per_kilotoken(results: list[dict], name: str) -> float:
    rounds = zip(*(result[name] for result in results), strict=True)
    return median(max(1e6 * turn["seconds"] / turn["tokens"] for turn in turns) for turns in rounds)


def _step_ms(results: list[dict], name: str) -> float:
    rounds = zip(*(result[name] for result in results), strict=True)
    return median(max(1e3 * turn["seconds"] / turn["steps"] for turn in turns) for turns in rounds)


def _check(results: list[dict]) -> None:
    losses = [turn["loss"] for result in results for name in ("ours", "ddp", "ddp_float16") for turn in result[name]]
    if not max(losses) - min(losses) <= LOSS_TOLERANCE * min(losses):
        raise BenchFailed(f"the same training came to losses from {min(losses):.4f} to {max(losses):.4f}")


def _links(
    given: argparse.Namespace, stack: ExitStack
) -> tuple[list[tuple[str, ...]], list[str], tuple[str, ...], str]:
    """What runs a command in each place, the coordinator's first; the workers' hosts; the coordinator's flags; Gloo's
    interface.
    """
    if not given.rate:
        return [()] * (given.workers + 1), ["127.0.0.1"] * given.workers, (), "lo"
    places = stack.enter_context(links.places(given.workers + 1, given.rate))
    flags = ("--listen", f"{places[0].address}:0", "--insecure")
    return [place.prefix for place in places], [place.address for place in places[1:]], flags, places[0].device


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="worker processes, 2 or more")
    parser.add_argument("--steps", type=int, default=20, help="steps of each round that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=16, help="samples of a step, of all workers")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches of a step, of all workers")
    parser.add_argument("--path", choices=("shm", "grpc"), default="shm", help="how our gradients travel")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="star", help="who reduces")
    parser.add_argument("--wire", choices=WIRE_DTYPES, default="float32", help="element type on our wire")
    parser.add_argument("--rate", type=float, default=0.0, help="megabits a second of each link (default: one host)")
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    given = parser.parse_args()
    counts = ("steps", "rounds", "width", "blocks", "context", "samples", "microbatches")
    if given.workers < 2 or min(getattr(given, name) for name in counts) < 1 or not 0 <= given.rate < math.inf:
        parser.error(f"--workers must be at least 2, --{', --'.join(counts)} at least 1, --rate a number from 0 on")
    if given.microbatches % given.workers or given.samples % given.microbatches:
        parser.error("--workers must divide --microbatches, and that --samples: DDP has equal shares only")
    if given.topology == "torch" and given.wire != "float32":
        parser.error("--topology torch sends float32")
    if given.rate or given.topology == "torch":
        given.path = "grpc"
    return given


if __name__ == "__main__":
    sys.exit(main())
