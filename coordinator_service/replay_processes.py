"""Makes steps of a run again: a coordinator and one worker on this machine, ended when the steps are there.  [shell]"""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ayni.process import DONE
from coordinator_service.replay import FINAL_PARAMETERS, Plan
from coordinator_service.store import open_folder
from coordinator_service.store_records import CommitRecord

_START_S = 60.0
_END_S = 30.0
_LOOK_S = 0.05
_LAST_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Files of the replay.

    Attributes:
        folder: where its state and logs go.
        artifacts: folder of the run's files; none for runs without.
        worker_flags: further flags of the worker.
    """

    folder: Path
    artifacts: Path | None
    worker_flags: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What the replay's own ledger says."""

    commits: Sequence[CommitRecord]
    final_parameters_sha256: str


def make_steps(plan: Plan, places: Places) -> Made:
    """Makes the plan's steps.

    Raises:
        OSError: a process did not start, or ended before the steps were there; the ends of their logs were
            printed then.
    """
    folder = places.folder
    run_file = folder / "run.yaml"
    run_file.write_text(json.dumps({**plan.run, **_own_settings(places)}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AYNI_")}
    environment |= {"AYNI_TOKEN": secrets.token_urlsafe()}
    state = folder / "state" / str(plan.run["run_id"])
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(
            _process(folder, "coordinator", ["-m", "coordinator_service", "--config", str(run_file)], environment)
        )
        address = _address(coordinator, folder)
        store = stack.enter_context(contextlib.closing(open_folder(state, to_read=True)))
        flags = ["--coordinator", address, "--name", "replay", "--output-dir", str(folder / "worker")]
        command = ["-m", "worker_agent", *flags, "--no-tensorboard", *places.worker_flags]
        worker = stack.enter_context(_process(folder, "worker", command, environment))
        # After the run's last step both end by themselves, and say what the parameters are.
        while worker.poll() is None and (plan.is_to_the_end or store.committed_steps() < plan.stop_step):
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(_LOOK_S)
        _end(coordinator, worker)
        made = Made(commits=store.commits(), final_parameters_sha256=store.facts().get(FINAL_PARAMETERS, ""))
    if not made.commits or made.commits[-1].step + 1 < plan.stop_step:
        _show_logs(folder)
        raise OSError(
            "the replay ended before its steps were there; the ends of its logs are above. Its worker may need flags "
            "that the run's workers had; they go after --, as in -- --blocks-root DIR"
        )
    return made


def _own_settings(places: Places) -> dict[str, object]:
    settings: dict[str, object] = {"state_dir": str(places.folder / "state"), "fresh": True, "listen": "127.0.0.1:0"}
    if places.artifacts:
        settings["artifacts"] = str(places.artifacts)
    return settings


@contextlib.contextmanager
def _process(
    folder: Path, name: str, command: Sequence[str], environment: dict[str, str]
) -> "Iterator[subprocess.Popen[str]]":
    """A process whose messages go into a file; killed in the end if it is still there."""
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
    assert process.stdout
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def _address(coordinator: "subprocess.Popen[str]", folder: Path) -> str:
    assert coordinator.stdout
    ready, _, _ = select.select([coordinator.stdout], [], [], _START_S)
    line = coordinator.stdout.readline() if ready else ""
    if not line.startswith("listening on "):
        _show_logs(folder)
        raise OSError("the replay's coordinator did not start; the end of its log is above")
    return line.split()[-1]


def _end(coordinator: "subprocess.Popen[str]", worker: "subprocess.Popen[str]") -> None:
    """Ends both. A coordinator whose worker has finished the run ends by itself; else SIGINT makes both leave it."""
    if worker.poll() != DONE:
        coordinator.send_signal(signal.SIGINT)
    for process in (worker, coordinator):
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.terminate()


def _show_logs(folder: Path) -> None:
    """Prints the ends of both logs, whose lines an error's sentence can't hold."""
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        print("\n".join([f"{path}:", *lines]), file=sys.stderr, flush=True)
