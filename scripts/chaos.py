"""Runs a job while its processes are killed, stopped, cut off and replaced, and checks that nothing was lost.

Three runs with real processes on loopback: one worker without events, whose final parameters are what must come out
(kept for the next time); all workers without events, whose rate is the undisturbed rate; and all workers with the
events that the seed gives. The last line on standard output is one JSON object; the exit code is 0 if no sample is
missing or used twice, all workers end with the same parameters, and these are equal to the first run's. With a wire
type that rounds, parameters depend on who computed what: the first run is left out, and `parameters_equal` is null.

Usage: `python scripts/chaos.py --seed 1 --steps 200 --workers 3 --every 5`
"""

import argparse
import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ayni.settings import SettingsError
from scripts.chaos_fleet import ROOT, ChaosFailed
from scripts.chaos_job import Job, default_job, job_from
from scripts.chaos_result import (
    Happened,
    count_samples,
    median_step,
    rounding,
    steps_per_second,
    worst_return,
    worst_stalls,
)
from scripts.chaos_run import Chaos, Record
from scripts.chaos_schedule import KINDS, schedule
from scripts.chaos_ways import Proxies, Ways

FAILED, WRONG_USE = 1, 2
WIRES = ("float32", "bfloat16", "int8")
_CHECK_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return asyncio.run(_until_signal(_Program(given)))
    except SettingsError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return WRONG_USE
    except ChaosFailed as error:
        print(f"chaos: {error}", file=sys.stderr)
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("chaos: interrupted", file=sys.stderr)
        return FAILED


async def _until_signal(program: "_Program") -> int:
    """Runs everything; SIGTERM ends it as SIGINT does, with all processes."""
    running = asyncio.create_task(program.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    return await running


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {kind:12} {text}" for kind, text in KINDS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"kinds of events:\n{kinds}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="fixes the events (default: 0)")
    parser.add_argument("--runs", type=_positive, default=1, help="seeds to run, from --seed on; one JSON object each")
    parser.add_argument("--steps", type=_positive, default=200, help="steps of the run (default: 200)")
    parser.add_argument("--workers", type=_positive, default=3, help="workers to begin with (default: 3)")
    parser.add_argument("--every", type=_positive, default=5, help="steps from event to event, on average (default: 5)")
    parser.add_argument(
        "--kinds", type=_kinds, default=tuple(KINDS), help="kinds of events, with commas (default: all)"
    )
    parser.add_argument("--run", type=Path, help="run file (YAML) instead of the light job")
    parser.add_argument(
        "--wire", choices=WIRES, help="element type of gradients on the wire (default: the run file's, or float32)"
    )
    parser.add_argument("--step-ms", type=float, default=100.0, help="length of a step of the light job (default: 100)")
    parser.add_argument(
        "--store-every",
        type=int,
        default=20,
        help="steps between stored states of the light job; 0: never (default: 20)",
    )
    parser.add_argument(
        "--survivors",
        type=int,
        default=1,
        help="unharmed, up-to-date workers that every event leaves; it is put off until it does (default: 1)",
    )
    parser.add_argument(
        "--topology",
        choices=("star", "sharded", "auto"),
        default="star",
        help="who reduces gradients; the final parameters are the same (default: star)",
    )
    parser.add_argument("--netns", action="store_true", help="a network namespace for each worker (root only)")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "out" / "chaos", help="folder for logs and state")
    parser.add_argument("--json-only", action="store_true", help="no progress on standard error")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(filter(None, text.split(",")))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: kinds are {', '.join(KINDS)}")
    return kinds


class _Program:
    """The runs, and what they come to."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._output: Path = given.output_dir.resolve()
        self._token = secrets.token_urlsafe()
        self._say: Callable[[str], None] = _quiet if given.json_only else _aloud
        self._job = self._make_job()

    async def run(self) -> int:
        given = self._given
        expected = "" if rounding(self._job.wire_type) else await self._reference()
        undisturbed = await self._make("undisturbed", Chaos, self._job)
        if expected and undisturbed.parameters_sha256 != expected:
            self._say(
                f"chaos: without any event {given.workers} workers end with other parameters than one worker; "
                f"see {self._output / 'undisturbed'}"
            )
        code = 0
        for seed in range(given.seed, given.seed + given.runs):
            code |= await self._chaos(seed, expected, undisturbed)
        return code

    def _make_job(self) -> Job:
        job = self._whole_job()
        return job.with_wire(self._given.wire) if self._given.wire else job

    def _whole_job(self) -> Job:
        given = self._given
        if given.run:
            # Which samples are spoilt is a matter of the task, so other jobs have none.
            return job_from(given.run, given.steps).with_workers(given.workers).with_topology(given.topology)
        job = default_job(
            given.steps, given.workers, given.step_ms, with_nan="nan" in given.kinds, store_every=given.store_every
        )
        return job.with_topology(given.topology)

    async def _reference(self) -> str:
        """Returns the final parameters of one worker alone, from the last time if nothing has changed since."""
        kept = self._output / "references" / f"{self._job.key()}.json"
        if kept.exists():
            return str(json.loads(kept.read_text())["parameters_sha256"])
        record = await self._make("reference", Chaos, self._job.reference(), workers=1)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"parameters_sha256": record.parameters_sha256}))
        return record.parameters_sha256

    async def _chaos(self, seed: int, expected: str, undisturbed: Record) -> int:
        given, began = self._given, time.monotonic()
        name = f"seed-{seed}"
        events = (*schedule(seed, given.steps, given.workers, given.every, given.kinds), *self._job.spoilt)
        record = await self._make(name, Chaos, self._job, events=events, survivors=given.survivors)
        ledger = _check_ledger(self._output / name / "state" / self._job.run_id)
        result = self._result(seed, record, undisturbed, expected)
        result |= {"ledger": "clean" if not ledger else ledger, "wall_s": round(time.monotonic() - began, 1)}
        print(json.dumps(result), flush=True)
        wrong = result["samples_missing"] or result["samples_duplicated"] or ledger
        if wrong or not result["workers_agree"] or result["parameters_equal"] is False:
            self._say(f"chaos: seed {seed} lost something; see {self._output / name / 'coordinator.log'}")
            return FAILED
        return 0

    async def _make(self, name: str, make: type[Chaos], job: Job, **options: Any) -> Record:
        """Makes one run in a new folder."""
        folder = self._output / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._say(f"run {name}; logs in {folder}")
        options = {"workers": self._given.workers, **options}
        return await make(job=job, folder=folder, token=self._token, ways=self._ways(), say=self._say, **options).run()

    def _ways(self) -> Ways:
        if self._given.netns:
            from scripts.chaos_netns import Namespaces

            return Namespaces(self._say)
        return Proxies()

    def _result(self, seed: int, record: Record, undisturbed: Record, expected: str) -> dict[str, Any]:
        samples = count_samples(record.commits, self._job.steps, self._job.batch)
        usual = median_step(undisturbed.times)
        why = rounding(self._job.wire_type)
        return {
            "seed": seed,
            "wire_type": self._job.wire_type,
            "events": [_event(happened) for happened in record.happened],
            "steps_committed": sum(commit.kind == "train" for commit in record.commits),
            "samples_missing": samples.missing,
            "samples_duplicated": samples.duplicated,
            "workers_agree": bool(record.parameters_sha256),
            "parameters_equal": None if why else bool(expected) and record.parameters_sha256 == expected,
            **({"parameters_equal_reason": why} if why else {}),
            "goodput": _ratio(self._rate(record), self._rate(undisturbed)),
            "worst_stall_s": worst_stalls(record.times, record.happened, usual),
            "coordinator_back_s": worst_return(record.times, record.listened),
            "median_step_s": round(usual, 4),
            "steps_made_again": len(record.superseded),
            "events_left_over": len(record.left_over),
            "restarts": record.restarts,
            "ended_badly": record.bad_ends,
        }

    def _rate(self, record: Record) -> float:
        """Returns steps of the run per second: steps that were made again count once."""
        times = record.times
        again = sum(commit.kind == "train" for commit in record.superseded)
        return steps_per_second(times) * (len(times) - 1 - again) / max(len(times) - 1, 1)


def _ratio(ours: float, theirs: float) -> float | None:
    return round(ours / theirs, 3) if theirs else None


def _event(happened: Happened) -> dict[str, Any]:
    event = happened.event
    values: dict[str, Any] = {"step": happened.step, "kind": event.kind, "target": event.target}
    if event.mode:
        values["mode"] = event.mode
    if event.seconds:
        values["seconds"] = event.seconds
    return values


def _check_ledger(folder: Path) -> str:
    """Has the coordinator's own command check the ledger; returns what it found wrong."""
    command = [sys.executable, "-m", "coordinator_service", "ledger", "--run", str(folder), "--check"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_CHECK_S, check=False, cwd=ROOT, env=environment
    )
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-500:]


def _aloud(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _quiet(line: str) -> None:
    """For --json-only; failures are said all the same, where they end the program."""


if __name__ == "__main__":
    sys.exit(main())
