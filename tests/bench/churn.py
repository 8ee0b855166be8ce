"""Training while workers die: ours, torchft + DDP and Hivemind, through the same schedule.

Every --every steps one worker is killed with SIGKILL, and a new process takes its place at once. Each contender trains
the same tiny model with the same waits for a device; each runs without deaths first, so that goodput is a fraction of
its own undisturbed rate in samples per second. The others run with their defaults and with short timeouts ("tuned"),
ours with its defaults. They are installed into virtual environments of their own below --cache-dir; what can't be
installed is left out and said. The last line on standard output is one JSON object.

Usage: `python tests/bench/churn.py --keep`
"""

import argparse
import asyncio
import json
import secrets
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.chaos_job import default_job
from scripts.chaos_result import median_step, steps_per_second
from scripts.chaos_run import Chaos, Record
from scripts.chaos_schedule import Event
from tests.bench.churn_line import BATCH
from tests.bench.churn_measure import Outcome
from tests.bench.churn_peers import PEERS, Churn, run_peer
from tests.bench.peer_environments import CACHE, PeerFailed, environment_of
from tests.bench.report import hardware, keep, report, row

GOALS = {"stall_s": 1.0, "goodput": 0.85}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all contenders; returns the exit code."""
    given = _parser().parse_args(arguments)
    # A signal unwinds the stack, which ends all processes.
    signal.signal(signal.SIGTERM, _interrupt)
    measured_on = hardware()
    churn = Churn(
        steps=given.steps,
        workers=given.workers,
        every=given.every,
        device_ms=given.step_ms * given.workers / BATCH,
    )
    rows, samples, failed = [], {}, {}
    with tempfile.TemporaryDirectory(prefix="ayni-churn-") as scratch:
        folder = given.output_dir or Path(scratch)
        print("ours", file=sys.stderr)
        ours = _ours(churn, given.step_ms, folder / "ours")
        samples["ours"] = {name: asdict(outcome) for name, outcome in ours.items()}
        rows += _goal_rows(ours)
        for peer in PEERS:
            for tuned in (False, True) if peer.name in given.peers else ():
                label = f"{peer.label} {'tuned' if tuned else 'defaults'}"
                print(label, file=sys.stderr)
                try:
                    python = environment_of(peer.package, given.cache_dir)
                    theirs = {
                        "calm": run_peer(peer, python, tuned, replace(churn, every=0), folder / f"{label} calm"),
                        "churn": run_peer(peer, python, tuned, churn, folder / f"{label} churn"),
                    }
                except PeerFailed as error:
                    failed[label] = str(error)
                    print(f"churn: {error}", file=sys.stderr)
                    continue
                samples[label] = {name: asdict(outcome) for name, outcome in theirs.items()}
                rows += _rows(ours, label, theirs)
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    result = report("churn", rows, options, {**samples, "not_measured": failed}, measured_on)
    if given.keep:
        print(keep(result), file=sys.stderr)
    print(json.dumps(result), flush=True)
    return 0


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--every", type=int, default=20, help="steps from death to death")
    parser.add_argument("--step-ms", type=float, default=500.0, help="length of a step with all workers there")
    parser.add_argument("--peers", default=",".join(peer.name for peer in PEERS), help="with commas")
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    parser.add_argument("--output-dir", type=Path, help="folder for logs (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="write the result to tests/bench/results")
    return parser


def _ours(churn: Churn, step_ms: float, folder: Path) -> dict[str, Outcome]:
    job = default_job(churn.steps, churn.workers, step_ms, with_nan=False, store_every=0)
    events = [Event(step=step, kind="kill", target=name) for step, name in churn.deaths()]
    outcomes = {}
    for name, happening in (("calm", []), ("churn", events)):
        (folder / name).mkdir(parents=True)
        chaos = Chaos(
            job=job,
            workers=churn.workers,
            folder=folder / name,
            token=secrets.token_urlsafe(),
            events=happening,
            say=lambda line: print(line, file=sys.stderr),
        )
        outcomes[name] = _outcome(asyncio.run(chaos.run()))
    return outcomes


def _outcome(record: Record) -> Outcome:
    times, usual = record.times, median_step(record.times)
    stalls = []
    for happened in record.happened:
        before = max(moment for moment in times if moment <= happened.unix_time)
        after = min(moment for moment in times if moment > happened.unix_time)
        stalls.append(round(max(after - before - usual, 0.0), 3))
    return Outcome(
        samples_per_second=BATCH * steps_per_second(times),
        median_step_s=usual,
        stalls_s=tuple(stalls),
        steps_lost=len(record.superseded) + sum(commit.attempt for commit in record.commits),
        # The coordinator fails when members end with different parameters, and says nothing when it knows of none.
        distinct_replicas=1 if record.parameters_sha256 else 0,
    )


def _goodput(runs: dict[str, Outcome]) -> float:
    return runs["churn"].samples_per_second / runs["calm"].samples_per_second


def _goal_rows(ours: dict[str, Outcome]) -> list[dict]:
    worst = max(ours["churn"].stalls_s)
    return [
        row("worst stall of survivors after kill -9", worst, "goal", GOALS["stall_s"], "s", 1.0),
        row("undisturbed rate / rate with deaths", 1 / _goodput(ours), "goal", 1 / GOALS["goodput"], "x", 1.0),
    ]


def _rows(ours: dict[str, Outcome], label: str, theirs: dict[str, Outcome]) -> list[dict]:
    mine, other = ours["churn"], theirs["churn"]
    return [
        _row("worst stall of survivors after kill -9", max(mine.stalls_s), label, max(other.stalls_s), "s"),
        _row(
            "median stall of survivors after kill -9",
            statistics.median(mine.stalls_s),
            label,
            statistics.median(other.stalls_s),
            "s",
        ),
        _row("steps thrown away per death", _lost(mine), label, _lost(other), "steps"),
        _row("undisturbed rate / rate with deaths", 1 / _goodput(ours), label, 1 / _goodput(theirs), "x"),
        _row("time of a sample, undisturbed", _per_sample(ours), label, _per_sample(theirs), "ms"),
        _row("different parameters at the end", mine.distinct_replicas, label, other.distinct_replicas, "replicas"),
    ]


def _lost(outcome: Outcome) -> float:
    return outcome.steps_lost / len(outcome.stalls_s)


def _per_sample(runs: dict[str, Outcome]) -> float:
    return 1000 / runs["calm"].samples_per_second


def _row(case: str, ours: float, peer: str, theirs: float, unit: str) -> dict:
    """A comparison whose goal is not to be worse; two zeros are equal."""
    if theirs:
        return row(case, ours, peer, theirs, unit, 1.0)
    return {
        "case": case,
        "ours": ours,
        "peer": peer,
        "theirs": theirs,
        "unit": unit,
        "ratio": None,
        "goal": 1.0,
        "met": not ours,
    }


if __name__ == "__main__":
    sys.exit(main())
