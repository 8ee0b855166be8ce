"""Shows that N unequal workers give the training run that one process gives.

Usage: `make equality`, or `python tests/bench/equality.py --workers 1 2 3 5 --steps 50`. Runs every case with real
coordinator and worker processes over gRPC, and compares: reduced gradients and parameters of all workers of all runs,
byte by byte, after every step; the first step with float64 twins; losses with plain single-process torch loops; and
known mistakes with what they would give (tests/support/equality_checks.py says how errors are measured).

With `--backends cpu,wgpu` the runs are one worker on the CPU, and one worker on each of the named backends. Bounds are
the same. Two things differ, because another device rounds a micro-batch's gradient, and an optimizer's step, in another
way: updates run on the host in every case, and bytes are compared among the workers of a run. Between the two runs the
first mean gradient is held to the bound of the float64 twins; sums are checked against the very gradients that each
device computed. In addition each backend must have had a part in every step, and nothing may have fallen back to the
CPU.

Standard output gets one JSON object, standard error one line for each run. Exit code 1 when anything is not equal.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.equality_places import Crew

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT), str(ROOT / "proto")]
sys.path[:0] = PATHS

PRELOADED = ["worker_agent.tasks.causal_lm", "tests.support.equality_worker"]
"""Modules that workers have when they are forked. None of them loads gRPC, which does not like to be forked."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; returns the exit code."""
    given = _parser().parse_args(arguments)
    # Before torch is loaded here, and for the processes that are started from here.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
    began, context = time.monotonic(), _start_fork_server()
    from tests.support.equality_report import compare_counter_examples, summarize, train_and_compare
    from tests.support.equality_runs import RunFailed

    with tempfile.TemporaryDirectory(prefix="ayni-equality-") as folder:
        try:
            trained = train_and_compare(context, Path(folder), _crews(given), given.steps, _say)
        except RunFailed as error:
            _say(str(error))
            return _finish({"ok": False, "error": str(error)})
    return _finish(summarize(trained, compare_counter_examples(), time.monotonic() - began))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = parser.add_mutually_exclusive_group()
    runs.add_argument("--workers", type=_at_least(1), nargs="+", default=[1, 2, 3, 5], help="numbers of workers")
    runs.add_argument(
        "--backends", type=_backends, help="one worker on each, such as cpu,wgpu, against one worker on the CPU"
    )
    parser.add_argument("--wgpu-engine", default="auto", help="the only engine of backend wgpu to try")
    parser.add_argument("--allow-software-gpu", action="store_true", help="for wgpu a driver in software will do")
    parser.add_argument("--steps", type=_at_least(6), default=50, help="optimizer steps of every run")
    return parser


def _crews(given: argparse.Namespace) -> "list[Crew]":
    """Returns what each worker of each run computes on."""
    from tests.support.equality_places import CPU, Place

    if not given.backends:
        return [(CPU,) * number for number in given.workers]
    wgpu = Place(backend="wgpu", engine=given.wgpu_engine, allow_software=given.allow_software_gpu)
    return [(CPU,), tuple(wgpu if name == "wgpu" else Place(backend=name) for name in given.backends)]


def _start_fork_server() -> ForkServerContext:
    """Starts the process that workers are forked from; it loads what they share while this one does the same."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return context


def _backends(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ("cpu", "cuda", "wgpu"):
            raise argparse.ArgumentTypeError(f"{name!r} is none of cpu, cuda, wgpu")
    return names


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return int(text)

    return number


def _finish(result: dict[str, Any]) -> int:
    print(json.dumps(result, indent=2 if sys.stdout.isatty() else None, allow_nan=False), flush=True)
    return 0 if result["ok"] else 1


def _say(text: str) -> None:
    print(f"equality: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
