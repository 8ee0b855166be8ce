"""What a transfer is asked for, and how it ends.  [core]"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import Axis, AxisOrder, LayoutHandle, LocalLayout, Tier
from ayni.errors import AyniError, BadRequest

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_DRAIN_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSlice:
    """A part of every block along one axis, in the coordinates of the rank that holds the blocks."""

    axis: Axis
    start: int
    stop: int
    """One past the last index; more than start."""

    @property
    def length(self) -> int:
        """Indices in the slice."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounce:
    """Blocks that a transfer may pass through where two tiers can't be copied between directly."""

    layout: LayoutHandle
    """In host memory."""
    blocks: Ids
    """Each once, at least one; their bytes are undefined afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferOptions:
    """How a transfer is done. What a worker can't do it refuses with UNSUPPORTED; no option is dropped."""

    layers: tuple[int, int] | None = None
    """First layer and one past the last; None: all."""
    bounce: Bounce | None = None
    """None: the worker takes blocks of its own where it needs some."""
    source_axis_order: AxisOrder | None = None
    """Read the source as if it had this order; None: its own."""
    destination_axis_order: AxisOrder | None = None
    """Write the destination as if it had this order; None: its own."""
    write_notification: int | None = None
    """Number that the owner of the destination is told after a push."""
    engine: str = ""
    """Engine that must be used; empty: the one chosen when the peer was connected."""
    checksum: bool = False
    """Send a checksum with every chunk and compare it."""
    route: str = ""
    """Label under which bytes are counted; empty: the tiers' names."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Time until the deadline. The result is there no later."""
    drain_s: float = DEFAULT_DRAIN_S
    """How long before the deadline no further copy is started, so that the last ones can end."""

    def __post_init__(self) -> None:
        """Checks times and layers."""
        if not 0 < self.timeout_s < 1e9 or not 0 <= self.drain_s < self.timeout_s:
            raise BadRequest(
                f"a transfer needs 0 <= drain_s < timeout_s; got {self.drain_s:g} and {self.timeout_s:g}",
                field="options.timeout_s",
            )
        if self.layers is not None and not 0 <= self.layers[0] < self.layers[1]:
            raise BadRequest(f"the layer range {self.layers} is empty or reversed", field="options.layers")


DEFAULT_OPTIONS = TransferOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteBlocks:
    """Blocks of an imported layout."""

    layout: LayoutHandle
    blocks: Ids


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectKeys:
    """Stored objects."""

    keys: tuple[bytes, ...]
    """Sequence hashes, 24 bytes each; see `ayni.blocks.sequence_hash`."""


RemoteDescriptor = RemoteBlocks | ObjectKeys


@dataclass(frozen=True, kw_only=True, slots=True)
class PullShard:
    """Which part of a rank's blocks comes from which remote rank."""

    remote_rank: int
    source_slice: AxisSlice | None = None
    """None: all of each remote block."""
    destination_slice: AxisSlice | None = None
    """None: all of each local block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PullPlan:
    """What one rank pulls from the ranks of a connected group; the id lists are the same on every rank."""

    instance_id: str
    remote_tier: Tier
    source_blocks: Ids
    destination: LocalLayout
    destination_blocks: Ids
    shards: tuple[PullShard, ...]
    """Together they fill each destination block exactly once. Empty: whole blocks from the rank's counterpart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why something failed, as a refusal would say it."""

    reason: str
    """A reason word of `ayni.errors`."""
    message: str
    metadata: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, error: AyniError) -> "Failure":
        """Returns what a refusal says."""
        return cls(reason=error.reason, message=error.message, metadata=tuple(sorted(error.metadata.items())))

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFailure:
    """Why one block of a transfer is not done."""

    index: int
    """Place in the request's lists."""
    block: int
    """Id of its destination block; 0 when the destination is an object."""
    failure: Failure


class AllFailed(Sequence[BlockFailure]):
    """Failures of a transfer of which no block is done, for one reason: made one by one, when they are looked at."""

    __slots__ = ("_blocks", "_places", "failure")

    def __init__(self, blocks: Ids, failure: Failure, places: Ids | None = None) -> None:
        """Takes all destination blocks, why they failed, and their places in the request; None: in order."""
        self._blocks, self._places = blocks, places
        self.failure = failure

    @property
    def indices(self) -> Iterable[int]:
        """Places in the request's lists, in order."""
        return range(len(self)) if self._places is None else self._places.tolist()

    def at(self, places: Ids) -> "AllFailed":
        """Returns the same failures, where block i has place places[i] in a larger request."""
        return AllFailed(self._blocks, self.failure, places if self._places is None else places[self._places])

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> BlockFailure: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[BlockFailure, ...]: ...
    def __getitem__(self, index: int | slice) -> BlockFailure | tuple[BlockFailure, ...]:
        places = range(len(self))[index]
        return self._one(places) if isinstance(places, int) else tuple(map(self._one, places))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, AllFailed):
            same = self.failure == other.failure and np.array_equal(self._blocks, other._blocks)
            return same and (self._places is other._places or list(self.indices) == list(other.indices))
        return (
            isinstance(other, tuple)
            and len(self) == len(other)
            and all(a == b for a, b in zip(self, other, strict=True))
        )

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"AllFailed({len(self)} blocks, {self.failure!r})"

    def _one(self, place: int) -> BlockFailure:
        index = place if self._places is None else int(self._places[place])
        return BlockFailure(index=index, block=int(self._blocks[place]), failure=self.failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferOutcome:
    """How a transfer ended on one rank. Every block that is not among `failures` is done."""

    rank: int
    num_done: int
    failures: Sequence[BlockFailure] = ()
    """A tuple or `AllFailed`, in order of index. Their destinations hold undefined bytes."""
    transferred_bytes: int = 0
    """Bytes of the blocks that are done."""
    elapsed_s: float = 0.0
    engines: tuple[str, ...] = ()
    """In order of first use: "local", "shm", "grpc", "nixl", "object"."""
    quiesced: bool = True
    """No byte of the transfer can land any more."""
    refusal: Failure | None = None
    """Why the rank did not even start; all blocks are among `failures` then."""

    @property
    def is_done(self) -> bool:
        """Whether every block is done."""
        return not self.failures and self.refusal is None


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferResult:
    """How a transfer ended: one outcome for each rank that took part, in order of rank."""

    outcomes: tuple[TransferOutcome, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether every block is done on every rank."""
        return all(outcome.is_done for outcome in self.outcomes)

    @property
    def quiesced(self) -> bool:
        """Whether no byte can land on any rank any more."""
        return all(outcome.quiesced for outcome in self.outcomes)

    @property
    def transferred_bytes(self) -> int:
        """Bytes of the blocks that are done, over all ranks."""
        return sum(outcome.transferred_bytes for outcome in self.outcomes)

    def failed_indices(self) -> frozenset[int]:
        """Returns the places in the request's lists that are not done on every rank."""
        return frozenset(index for outcome in self.outcomes for index in _indices(outcome.failures))


class TransferFailed(Exception):
    """A transfer left blocks undone; `result` says which, where and why."""

    def __init__(self, result: TransferResult, what: str = "transfer") -> None:
        """Takes the whole result and what it was, as it begins "transfer failed"."""
        super().__init__(describe(result, what))
        self.result = result

    @property
    def reasons(self) -> frozenset[str]:
        """Reason words of all ranks and blocks."""
        blocks = {reason for outcome in self.result.outcomes for reason in _reasons(outcome.failures)}
        return frozenset(blocks | {o.refusal.reason for o in self.result.outcomes if o.refusal})


def refused(rank: int, destination_blocks: Sequence[int] | Ids, error: AyniError) -> TransferOutcome:
    """Returns the outcome of a rank that did not start."""
    failure = Failure.of(error)
    failures = AllFailed(np.asarray(destination_blocks, np.int64), failure)
    return TransferOutcome(rank=rank, num_done=0, failures=failures, refusal=failure)


def describe(result: TransferResult, what: str) -> str:
    """Returns a sentence about every rank that failed: how many blocks, and the first reason."""
    texts = [_describe_rank(outcome) for outcome in result.outcomes if not outcome.is_done]
    return f"{what} failed: {'; '.join(texts)}" if texts else f"{what} is done"


def _indices(failures: Sequence[BlockFailure]) -> Iterable[int]:
    return failures.indices if isinstance(failures, AllFailed) else (failure.index for failure in failures)


def _reasons(failures: Sequence[BlockFailure]) -> Iterable[str]:
    distinct = failures[:1] if isinstance(failures, AllFailed) else failures
    return (failure.failure.reason for failure in distinct)


def _describe_rank(outcome: TransferOutcome) -> str:
    if outcome.refusal:
        return f"rank {outcome.rank} refused: {outcome.refusal}"
    total = outcome.num_done + len(outcome.failures)
    first = outcome.failures[0]
    late = "" if outcome.quiesced else "; bytes may still land"
    count = f"{len(outcome.failures)} of {total} blocks"
    return f"rank {outcome.rank}: {count}, first block {first.block}: {first.failure}{late}"
