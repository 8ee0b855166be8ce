"""What both sides say of a step: its micro-batches, where time went, and its commit.  [core]"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ayni.buckets import Bucket
from ayni.shm.host import SharedMemoryOffer


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchStats:
    """One micro-batch's part in a step."""

    microbatch: int
    weight: int
    """Samples, or non-ignored tokens: what the summed loss and gradient are divided by, over all micro-batches."""
    loss_sum: float | None = None
    num_correct: int = 0
    num_predictions: int = 0
    non_finite: bool = False
    """Whether the weight is 0 because the loss or the gradient was not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Where a worker's time went in one step, in seconds."""

    compute: float = 0.0
    exchange: float = 0.0
    commit_wait: float = 0.0
    update: float = 0.0
    data: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The commit whose update was the last one of a train state, by what tells it from others of the same step."""

    epoch: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a worker says when it has done a lease."""

    num_buckets: int
    """Buckets that it contributed to; 0 when evaluating."""
    microbatches: Sequence[MicrobatchStats]
    """The leased micro-batches, in order."""
    parameters_sha256: str = ""
    """Of the parameters that the gradients were computed with; empty: not part of the audit."""
    times: StepTimes = StepTimes()
    """Where its time went."""
    following: bool = False
    """Whether its parameters lag behind the run: it only keeps the means."""
    square_sum: float = 0.0
    """Sum of the squares of what it contributed, over all parts and buckets; 0 for not said."""
    origin: Origin | None = None
    """Where the last update came from of the parameters that it had; None for not said."""
    generation: int = 0
    """Exchange group under which it contributed and received the means; 0 where the coordinator reduces."""
    slices: tuple["SliceDigest", ...] = ()
    """What it took down of the slices that it owns; on its first lease of the attempt only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMember:
    """One worker of an exchange group."""

    worker_id: int
    worker_name: str
    address: str = ""
    """Where other workers can dial it to have a slice reduced; empty when nobody can."""
    is_owner: bool = False
    """Whether it reduces slices; with topology "torch", whether its sums count."""
    store_address: str = ""
    """Where its rendezvous store listens; empty unless the topology is "torch"."""
    shared_memory: SharedMemoryOffer | None = None
    """Where members of its host can share memory with it; None for nowhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeGroup:
    """Workers that reduce the gradients of one attempt among themselves."""

    generation: int
    """Numbers the groups of a run; only grows."""
    topology: str
    """"sharded" or "torch"."""
    members: tuple[GroupMember, ...] = field(hash=False)  # There may be many, and the number says it all.
    """All workers of the attempt that are left, by rank."""
    secret: str = field(repr=False)
    """What the members show one another."""
    chunk_bytes: int
    """Bytes of every chunk but a slice's last one."""
    max_bucket_bytes: int = 16 << 30
    """Longest bucket that is reduced."""

    @property
    def owners(self) -> tuple[GroupMember, ...]:
        """Members that reduce slices, by rank."""
        return tuple(member for member in self.members if member.is_owner)

    def member(self, worker_id: int) -> GroupMember | None:
        """Returns the member with this number, or None."""
        return next((member for member in self.members if member.worker_id == worker_id), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceDigest:
    """What an owner took down of the mean of its slice of a bucket."""

    bucket: Bucket
    first_element: int
    num_elements: int
    digests: bytes
    """XXH3-128 of every segment of the mean, one after the other; see `ayni.reduce.digest`."""
    squares: tuple[float, ...]
    """Floats whose exact sum is that of the squares of the mean."""
    bucket_elements: int = 0
    """Elements of the whole bucket; 0 for not said."""


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
    checkpoint_writer: str = ""
    """Name of the worker that writes checkpoints, this step's included; empty: nobody."""
