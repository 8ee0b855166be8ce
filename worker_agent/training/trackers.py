"""Experiment trackers that a worker's numbers also go to: Weights & Biases, MLflow.  [shell]

Each is imported when it is asked for, and takes its own settings from the environment (WANDB_MODE, MLFLOW_TRACKING_URI,
...). A tracker that fails while training goes on is let go of with a warning.
"""

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from ayni.settings import SettingsError

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What numbers are told to."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Takes the numbers of a step."""

    def close(self) -> None:
        """Says that there are no more."""


class WandbTracker:
    """One run at Weights & Biases."""

    def __init__(self, run_id: str, worker: str) -> None:
        """Begins it, in the group of the training run."""
        self._run = _imported("wandb").init(project="ayni", group=run_id, name=f"{run_id}/{worker}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Takes the numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Ends it."""
        self._run.finish()


class MlflowTracker:
    """One run of MLflow."""

    def __init__(self, run_id: str, worker: str) -> None:
        """Begins it, in the experiment of the training run."""
        self._mlflow = _imported("mlflow")
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
            SettingsError: one is not known, or not installed.
        """
        if unknown := [name for name in names if name not in TRACKERS]:
            raise SettingsError(f"trackers: {', '.join(unknown)} is not one of {', '.join(TRACKERS)}")
        self._live: dict[str, Tracker] = {name: TRACKERS[name](run_id, worker) for name in names}

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Tells all."""
        for name, tracker in list(self._live.items()):
            try:
                tracker.log(values, step)
            except Exception as error:
                log.warning("tracker %s failed at step %d and gets no more numbers: %s", name, step, error)
                del self._live[name]

    def close(self) -> None:
        """Ends all."""
        for name, tracker in self._live.items():
            try:
                tracker.close()
            except Exception as error:
                log.warning("tracker %s could not be ended: %s", name, error)


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise SettingsError(f"trackers: {name} is not installed; pip install {name}") from None
