"""python -m coordinator_service replay: makes steps of a run again on this machine, and compares them.  [shell]"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ayni import logs
from ayni.process import DONE, FAILED, Stopped, exit_code_of, on_signal
from coordinator_service.replay import Compared, Plan, compare, final_equal, plan_replay
from coordinator_service.replay_processes import Places, make_steps
from coordinator_service.run_places import add_places, open_place, read_span

_DESCRIPTION = """
Makes steps A to B-1 of a run again, with one worker on this machine, and compares each step's gradients, parameters,
loss and weight with the ledger. It begins with the newest stored state at or before A, or with the run's start, and
prints one JSON object; the exit code is 1 if anything differs or is not known.

The bytes of a step do not depend on how many workers made it, so they are equal where the settings promise it: wire
type float32, the optimizer on the host (or on an equal device), an equal kind of device for forward and backward, no
local updates, a fixed number of micro-batches, none of them left out for not being finite. Whatever breaks the promise
is listed under "caveats".

What follows after -- goes to the worker, such as -- --backend cuda --blocks-root /srv/blocks; states that were stored
in a folder are found below the worker's blocks.root.
"""


def replay(arguments: Sequence[str]) -> int:
    """Makes steps again and compares them; returns the exit code."""
    own, worker_flags = _split(arguments)
    given = _parser().parse_args(own)
    logs.configure("text", "INFO")
    return exit_code_of(lambda: _replay(given, worker_flags))


def _replay(given: argparse.Namespace, worker_flags: Sequence[str]) -> int:
    with contextlib.closing(open_place(given)) as store:
        facts, commits = store.facts(), store.commits()
    plan = plan_replay(facts, commits, read_span(given.steps), given.source)
    artifacts = given.artifacts or (Path(facts["artifacts"]) if facts.get("artifacts") else None)
    with on_signal(_stop), _folder(given.work_dir) as folder:
        made = make_steps(plan, Places(folder=folder, artifacts=artifacts, worker_flags=worker_flags))
    compared = compare(plan, commits, made.commits)
    is_final_equal = final_equal(plan, facts, made.final_parameters_sha256)
    is_equal = compared.equal and is_final_equal is not False
    print(json.dumps(_result(plan, compared, is_equal, is_final_equal)), flush=True)
    return DONE if is_equal else FAILED


def _result(plan: Plan, compared: Compared, is_equal: bool, is_final_equal: bool | None) -> dict[str, object]:
    found = asdict(compared)
    return {
        "steps": f"{plan.asked.start}:{plan.asked.stop}",
        "made_from_step": plan.first_step,
        **found,
        "equal": is_equal,
        "final_parameters_equal": is_final_equal,
        "caveats": plan.caveats,
    }


def _stop(name: str) -> None:
    raise Stopped(name)


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="ayni-replay-") as folder:
        yield Path(folder)


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator_service replay",
        usage="%(prog)s [options] --steps A:B [-- FLAGS OF THE WORKER]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_places(parser)
    parser.add_argument("--steps", metavar="A:B", required=True, help="compare steps A to B-1; a left-out end is open")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="WHERE",
        default="stored",
        help="stored: the newest stored state up to A; start; or the steps behind a stored state (default: stored)",
    )
    parser.add_argument(
        "--artifacts", type=Path, metavar="DIR", help="folder of the run's files, as for the run itself"
    )
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="keep the replay's state and logs there")
    return parser
