"""What the coordinator's parts tell one another, and what it tells workers.  [core]"""

from dataclasses import dataclass

from ayni.order import microbatch_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A worker's lease in one attempt of one step; see coordinator.proto."""

    epoch: int
    step: int
    attempt: int
    kind: str
    lease_id: int
    microbatch_start: int
    microbatch_stop: int
    num_microbatches: int
    position: int
    num_samples: int
    rank: int
    world_size: int
    update: str

    @property
    def shard_start(self) -> int:
        """First sample position of the shard."""
        return self._position(self.microbatch_start)

    @property
    def shard_stop(self) -> int:
        """One past the last sample position of the shard."""
        return self._position(self.microbatch_stop)

    def _position(self, microbatch: int) -> int:
        return microbatch_positions(self.position, self.num_samples, self.num_microbatches, microbatch)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Why there is nothing to do."""

    reason: str
    worker_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """The end of the run for a worker."""

    reason: str
    finished: bool
    committed_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Where a worker's time went in one step, in seconds."""

    compute: float = 0.0
    exchange: float = 0.0
    commit_wait: float = 0.0
    update: float = 0.0
    data: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A committed step, as it is told to every worker."""

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
