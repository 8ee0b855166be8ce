"""What the coordinator's parts tell one another, and what it tells workers.  [core]"""

from dataclasses import dataclass

from ayni.blocks.metadata import WorkerMetadata
from ayni.order import microbatch_positions
from ayni.step_values import ExchangeGroup


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
    extra: bool = False
    publish_state: bool = False
    discard_state: bool = False
    group: ExchangeGroup | None = None
    """Who reduces among themselves; None where the coordinator does."""
    wire_type: str = ""
    traceparent: str = ""
    """Trace context in W3C form; empty where no traces are asked for."""

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
class Regroup:
    """Others reduce among themselves from now on, in the middle of an attempt."""

    step: int
    attempt: int
    group: ExchangeGroup
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeNews:
    """What a worker says of its exchange group beside its commits.

    Attributes:
        generation: group that it speaks of.
        contributed: leases whose contributions have left it whole.
        lost: owners that it could not reach.
        failed: why a reduction failed for good, for people; empty for nothing.
    """

    generation: int
    contributed: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    failed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Revoked:
    """A lease is taken back."""

    lease_id: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerState:
    """A train state in a worker's host tier."""

    worker_id: int
    worker_name: str
    metadata: WorkerMetadata
    relayed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StateOffer:
    """Where the state that a follower lacks can be had."""

    offer_id: int
    completed_steps: int
    source: PeerState | str
    """The worker that has it, or the run that stored it as objects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """The end of the run for a worker."""

    reason: str
    finished: bool
    committed_steps: int
    checkpoint_writer: str = ""
    """Name of the worker that writes the last checkpoint."""
    drained: bool = False
    """Whether only this worker is let go, and the run goes on."""
