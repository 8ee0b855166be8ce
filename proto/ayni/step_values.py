"""What both sides say of a step: its micro-batches, where time went, and its commit.  [core]"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchStats:
    """One micro-batch's part in a step."""

    microbatch: int
    weight: int
    """Samples, or non-ignored tokens: what the summed loss and gradient are divided by, over all micro-batches."""
    loss_sum: float | None = None
    num_correct: int = 0
    num_predictions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Where a worker's time went in one step, in seconds."""

    compute: float = 0.0
    exchange: float = 0.0
    commit_wait: float = 0.0
    update: float = 0.0
    data: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A committed step: the same values on every worker."""

    step: int
    attempt: int
    total_weight: int
    global_loss: float
    gradient_norm: float
    num_correct: int
    num_predictions: int
    learning_rate: float
    clip_factor: float
    best: bool
