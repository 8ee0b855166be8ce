"""What a training loop tells its caller.  [core]"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from worker_agent.session import StepTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseMoments:
    """When a lease was worked on."""

    lease_id: int
    began: float
    computed: float
    """Its last micro-batch was done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMoments:
    """Moments of one committed training step, those of `time.perf_counter`."""

    leases: tuple[LeaseMoments, ...]
    """The first lease, then further ones of the same attempt."""
    committed: float
    """The commit was known."""
    updating: float
    """Commit and all means were there; the update began."""
    updated: float
    traceparent: str = ""
    """Trace context of the attempt; empty where nobody traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One committed step, training or evaluation."""

    kind: str
    """"train" or "evaluate"."""
    step: int
    attempt: int
    epoch: int
    rank: int
    world_size: int
    num_microbatches: int
    """Micro-batches that this worker computed."""
    num_samples: int
    """Samples that this worker computed."""
    total_samples: int
    """Samples of the step over all workers."""
    total_weight: int
    """Samples or tokens of the step over all workers."""
    loss: float
    """Weighted mean over all workers."""
    num_correct: int
    num_predictions: int
    learning_rate: float
    gradient_norm: float
    clip_factor: float
    times: StepTimes
    wall_s: float
    """From the lease to the end of the update."""
    elapsed_s: float
    """Since training began on this worker."""
    note: str = ""
    """Why the step changed nothing, or which checkpoint was written; else empty."""
    best: bool = False
    """Whether an evaluation is the best so far."""
    following: bool = False
    """Whether this worker's parameters lag behind the run: it only kept what the step gave."""
    publish_state: bool = False
    """Whether another worker lacks the state that this one has after the step."""
    derived: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the task, such as bits per byte."""
    moments: StepMoments | None = None
    """Of training steps."""

    @property
    def accuracy(self) -> float | None:
        """Correct predictions over predictions; None when there were none."""
        return self.num_correct / self.num_predictions if self.num_predictions else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How training ended."""

    completed_steps: int
    skipped_steps: int
    """Committed steps of weight 0, which changed nothing."""
    voided_steps: int
    """Attempts that were given up and computed or sent again."""
    wall_s: float
    parameters_sha256: str
    """Empty when the parameters lag behind the run."""
    train_loss: float | None = None
    """Of the last training step."""
    evaluation: StepEvent | None = None
    """Last evaluation."""
    best: StepEvent | None = None
    """Best evaluation."""
