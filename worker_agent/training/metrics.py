"""Writes events to a JSON-lines file and, where they are there, to TensorBoard and trackers.  [shell]"""

import json
import logging
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from worker_agent.training.events import StepEvent
from worker_agent.training.trackers import Trackers

log = logging.getLogger(__name__)


class Metrics:
    """One run's metrics on one worker."""

    def __init__(self, folder: Path, *, tensorboard: bool = True, trackers: Trackers | None = None) -> None:
        """Appends to `folder`/metrics.jsonl; TensorBoard files go to `folder`/tensorboard."""
        self._trackers = trackers
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._file = self._path.open("ab", buffering=0)
        self._unwritten = b""
        self._writer = _summary_writer(folder / "tensorboard") if tensorboard else None
        self._is_failing = False

    def write(self, event: StepEvent) -> None:
        """Writes one event; the line is complete when this returns.

        Training does not end for its metrics: where they can't be written (a full disk), a warning says so once, and
        the lines follow as soon as there is room.
        """
        self._unwritten += f"{json.dumps(record(event))}\n".encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._is_failing:
                log.warning("metrics can't be written to %s: %s; training goes on", self._path, error)
            self._is_failing = True
        else:
            self._is_failing = False
        if self._writer is not None:
            for name, value in _scalars(event).items():
                self._writer.add_scalar(name, value, event.step)
        if self._trackers is not None:
            self._trackers.log(_scalars(event), event.step)

    def close(self) -> None:
        """Closes both."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()
        if self._trackers is not None:
            self._trackers.close()


def record(event: StepEvent) -> dict[str, object]:
    """Returns an event as plain values, one flat level but for the times and the task's own numbers; NaN is None.

    Moments are for the timeline: they mean nothing to another process.
    """
    samples_per_s = event.total_samples / event.wall_s if event.wall_s > 0 else None
    values = {**asdict(replace(event, moments=None)), "accuracy": event.accuracy, "samples_per_s": samples_per_s}
    del values["moments"]
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def _scalars(event: StepEvent) -> dict[str, float]:
    prefix = "train" if event.kind == "train" else "evaluation"
    values: dict[str, float | None] = {"loss": event.loss, "accuracy": event.accuracy, **event.derived}
    if event.kind == "train":
        values |= {
            "learning_rate": event.learning_rate,
            "gradient_norm": event.gradient_norm,
            "samples_per_s": event.total_samples / event.wall_s if event.wall_s > 0 else None,
            **{f"{name}_s": value for name, value in asdict(event.times).items()},
        }
    return {f"{prefix}/{name}": value for name, value in values.items() if value is not None}


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.info("TensorBoard scalars are off: package tensorboard is not installed")
        return None
    return SummaryWriter(str(folder))
