"""What an engine is: a way to move blocks between this worker and a peer.  [shell]

An engine registers whole layouts, once each; exports how it is reached; and connects to peers that export it too. A
link moves blocks with one peer. A ticket has an outcome, which is there by the deadline, and a separate `quiesced`:
no more bytes can land. Destination blocks are free again on quiesced, not on outcome.

Whoever submits has validated lengths, ranges, duplicates and sizes, and holds the local blocks. Nothing here runs on
the event loop for longer than the copy of a frame.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ayni.blocks.ids import MAX_BLOCK_IDS, Ids
from ayni.blocks.layouts import LayoutDescriptor, LayoutHandle, StorageKind
from ayni.blocks.metadata import EngineExport, WorkerMetadata
from ayni.blocks.transfers import Failure
from worker_agent.blocks.memory import WHOLE, Memory, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What an engine can do."""

    memory: frozenset[StorageKind]
    """Local memory that it reads from and writes to."""
    same_host_only: bool
    can_pull: bool
    can_push: bool
    cancel: str
    """ "none": bytes may land until the peer is forgotten; "drain": what is in hand ends first; "immediate"."""
    encrypted: bool
    largest_batch: int = MAX_BLOCK_IDS
    """Blocks of one move."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Blocks to move with one peer. Pair i is remote block i and local block i; both parts have the same bytes."""

    remote: LayoutDescriptor
    """As its owner exported it."""
    remote_blocks: Ids
    local: Memory
    local_blocks: Ids
    remote_part: Part = WHOLE
    local_part: Part = WHOLE
    checksum: bool = False
    write_notification: int | None = None
    """For a push."""
    deadline: float
    """Moment on the event loop's clock at which the outcome must be there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveResult:
    """How a move ended: every pair that is not named is done."""

    failures: tuple[tuple[int, Failure], ...] = ()
    """Place in the move's lists, and why; in order."""
    moved_bytes: int = 0
    """Bytes of the pairs that are done."""


class Ticket:
    """One move under way."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        """Makes a ticket on the running loop; `cancel` stops the move."""
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[MoveResult] = loop.create_future()
        self.quiesced: asyncio.Future[None] = loop.create_future()
        self.cancel = cancel
        """Starts no further copy; pairs not done fail with CANCELLED."""


class Link(Protocol):
    """One peer through one engine."""

    @property
    def engine(self) -> str:
        """Name of the engine."""

    def reaches(self, layout: LayoutDescriptor) -> bool:
        """Says whether blocks of this layout of the peer can be pulled."""

    def pull(self, move: Move) -> Ticket:
        """Copies the peer's blocks into local ones."""

    def push(self, move: Move) -> Ticket:
        """Copies local blocks into the peer's."""

    async def close(self) -> None:
        """Forgets the peer: what is in flight fails with PEER_LOST. Returns once no byte can land."""


class Engine(Protocol):
    """A way to move blocks."""

    @property
    def name(self) -> str:
        """Such as "grpc"."""

    @property
    def version(self) -> int:
        """Version of its export; both sides must have the same."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def register(self, handle: LayoutHandle, memory: Memory) -> None:
        """Lends a layout to peers, from the next export on. Does nothing for memory that it can't lend."""

    def deregister(self, handle: LayoutHandle) -> None:
        """Lends a layout no more: peers get refused from now on. Does nothing for a layout that was not lent."""

    def export(self) -> EngineExport | None:
        """Returns how peers reach this worker; None when the engine has nothing to offer."""

    async def connect(self, peer: WorkerMetadata, export: EngineExport, deadline: float) -> Link:
        """Connects to a peer and reads one block of its first layout, so that a link that exists works.

        Args:
            peer: the worker; layouts have their handles.
            export: its export of this engine; version and checksum were compared.
            deadline: moment on the event loop's clock.

        Raises:
            AyniError: PEER_LOST, DEADLINE, UNSUPPORTED (not possible with this peer), or what the peer said.
        """

    async def close(self) -> None:
        """Ends everything; links are closed before."""
