"""What is said about progress, in words.  [core]"""

from typing import Protocol


class StepSummary(Protocol):
    """What a sentence about a committed step needs; `worker_agent.training.events.StepEvent` has it."""

    @property
    def kind(self) -> str:
        """Either "train" or "evaluate"."""

    @property
    def step(self) -> int:
        """Step, counted from 0."""

    @property
    def world_size(self) -> int:
        """Workers of the step."""

    @property
    def num_samples(self) -> int:
        """Samples that this worker computed."""

    @property
    def total_samples(self) -> int:
        """Samples of the step over all workers."""

    @property
    def loss(self) -> float:
        """Weighted mean over all workers."""

    @property
    def accuracy(self) -> float | None:
        """Correct predictions over predictions."""

    @property
    def wall_s(self) -> float:
        """Seconds from the lease to the end of the update."""

    @property
    def best(self) -> bool:
        """Whether an evaluation is the best so far."""

    @property
    def note(self) -> str:
        """What else is to be said."""


def step_text(summary: StepSummary, num_steps: int) -> str:
    """Returns a committed step in words."""
    parts = [f"loss {summary.loss:.4f}"]
    if summary.accuracy is not None:
        parts.append(f"accuracy {summary.accuracy:.4f}")
    if summary.kind == "evaluate":
        parts += ["best so far"] if summary.best else []
    elif summary.wall_s > 0:
        parts.append(f"{summary.total_samples / summary.wall_s:.1f} samples/s")
        parts.append(f"here {summary.num_samples} of {summary.total_samples} samples, {_workers(summary)}")
    parts += [summary.note] if summary.note else []
    return f"{_moment(summary, num_steps)}: {', '.join(parts)}"


def short_step_text(summary: StepSummary, num_steps: int) -> str:
    """Returns a committed training step in few words, for one line of a terminal."""
    parts = [_moment(summary, num_steps), f"loss {summary.loss:.4f}"]
    if summary.wall_s > 0:
        parts.append(f"{summary.total_samples / summary.wall_s:.0f} samples/s")
    return ", ".join([*parts, _workers(summary)])


def fetched_text(done_bytes: int, total_bytes: int) -> str:
    """Returns the state of a fetch in words."""
    return f"fetching the run's files: {done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB"


def _workers(summary: StepSummary) -> str:
    return f"{summary.world_size} worker{'s' if summary.world_size != 1 else ''}"


def _moment(summary: StepSummary, num_steps: int) -> str:
    if summary.kind == "evaluate":
        return f"evaluation after {summary.step} steps"
    return f"step {summary.step + 1} of {num_steps}" if num_steps else f"step {summary.step + 1}"
