"""Experiment trackers that a worker's numbers also go to: Weights & Biases, MLflow.  [shell]

Each is imported when it is asked for, and takes its own settings from the environment (WANDB_MODE, MLFLOW_TRACKING_URI,
...). One that can't begin ends the worker before it joins; one that fails while training goes on is let go of with a
warning.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ayni.settings import SettingsError
from worker_agent.training.tracker_thread import TrackerThread

BEGIN_SECONDS = 120.0
END_SECONDS = 30.0

_SQLITE = "sqlite:///"


class WandbTracker:
    """One run at Weights & Biases."""

    def __init__(self, run_id: str, worker: str) -> None:
        """Begins it, in the group of the training run."""
        self._run = _imported("wandb").init(project="ayni", group=run_id, name=f"{run_id}/{worker}")
        # Its own steps may only grow; those of a run that goes back to an earlier state do not.
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Takes the numbers of a step."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Ends it."""
        self._run.finish()


class MlflowTracker:
    """One run of MLflow."""

    def __init__(self, run_id: str, worker: str) -> None:
        """Begins it, in the experiment of the training run."""
        self._mlflow = _imported("mlflow")
        with _alone_at(self._mlflow.get_tracking_uri()):
            self._mlflow.set_experiment(run_id)
            self._mlflow.start_run(run_name=worker)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Takes the numbers of a step."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Ends it."""
        self._mlflow.end_run()


TRACKERS: dict[str, type[WandbTracker] | type[MlflowTracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}


class Trackers:
    """All trackers of a worker."""

    def __init__(self, names: Sequence[str], run_id: str, worker: str) -> None:
        """Begins a run at each.

        Raises:
            SettingsError: one is not known, not installed, or could not begin.
        """
        if unknown := [name for name in names if name not in TRACKERS]:
            raise SettingsError(f"trackers: {', '.join(unknown)} is not one of {', '.join(TRACKERS)}")
        if len(set(names)) < len(names):
            raise SettingsError(f"trackers: {', '.join(names)} names one of them twice")
        deadline = time.monotonic() + BEGIN_SECONDS
        self._threads = {name: TrackerThread(name, partial(TRACKERS[name], run_id, worker)) for name in names}
        try:
            for name, thread in self._threads.items():
                _wait_begun(name, thread, deadline)
        except BaseException:
            self.close()
            raise

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Has all told; returns at once."""
        for thread in self._threads.values():
            thread.log(values, step)

    def close(self) -> None:
        """Ends all."""
        deadline = time.monotonic() + END_SECONDS
        for thread in self._threads.values():
            thread.close(deadline)


def _wait_begun(name: str, thread: TrackerThread, deadline: float) -> None:
    try:
        thread.begun.result(max(0.0, deadline - time.monotonic()))
    except SettingsError:
        raise
    except Exception as error:
        # The tracker's own attempt may have ended with a TimeoutError as well.
        if isinstance(error, TimeoutError) and not thread.begun.done():
            raise SettingsError(
                f"trackers: {name} did not begin within {BEGIN_SECONDS:.0f} s; is its server there?"
            ) from None
        raise SettingsError(f"trackers: {name} could not begin: {error}") from error


@contextlib.contextmanager
def _alone_at(uri: str) -> Iterator[None]:
    """Keeps other workers of this host from making the tables of one SQLite file at the same time, where one fails."""
    folder = Path(uri.removeprefix(_SQLITE).partition("?")[0]).parent
    if not uri.startswith(_SQLITE) or not folder.is_dir():
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Bounded by BEGIN_SECONDS, for which the worker waits; the kernel lets go for one that has died.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise SettingsError(f"trackers: {name} is not installed; pip install 'ayni[trackers]'") from None
