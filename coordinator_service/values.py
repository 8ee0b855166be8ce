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
