"""BlockWorker: what a leader can ask for, of one worker or of a whole group.  [core]

Three classes implement it: the engine inside an agent, the stub that calls an agent over gRPC, and a group of workers.
Whoever calls can't tell them apart, except by the number of ranks in an answer: a single worker answers for one rank.

Transfers start when their method is called and return at once; the notification says how they ended. A worker that
refuses to start (unknown block, busy block, ...) says so in the same place: an outcome with `refusal`. Awaiting a
notification raises TransferFailed unless every block of every rank is done, so that a failed block is never taken for
a loaded one by mistake. Calls about objects never raise for a key; they answer for each key, in input order.

Other calls raise AyniError when refused, and ConnectionError or Deadline when a worker can't be reached.
"""

from collections.abc import Awaitable, Generator, Iterable, Sequence
from typing import Any, Protocol

from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.metadata import Configured, GroupConfig, Imported, RemoteLayout, RemoteState, WorkerMetadata
from ayni.blocks.objects import KeyReport, PresenceReport
from ayni.blocks.transfers import DEFAULT_OPTIONS, PullPlan, RemoteDescriptor, TransferOptions, TransferResult


class Notification(Protocol):
    """Tells how a transfer ended; may be awaited by many. Terminal no later than the transfer's deadline."""

    def __await__(self) -> Generator[Any, None, TransferResult]:
        """Waits for the end; returns the result.

        Raises:
            TransferFailed: a block is not done on some rank.
        """

    def result(self) -> Awaitable[TransferResult]:
        """Waits for the end; returns the result, whatever it is."""

    def quiesced(self) -> Awaitable[None]:
        """Waits until no byte of the transfer can land any more; the destination blocks are free again then."""

    def cancel(self) -> None:
        """Starts no further copy; the blocks not done fail with CANCELLED. Does nothing after the end."""

    def could_yield(self) -> bool:
        """Says whether waiting for the end may take time: false once it has come."""


class BlockWorker(Protocol):
    """One worker, near or far, or a group of them."""

    @property
    def worker_count(self) -> int:
        """Ranks that answers come from."""

    async def configure_layouts(self, config: GroupConfig) -> Configured:
        """Creates lower tiers, names the worker's place in its group; see ConfigureLayouts."""

    async def export_metadata(self) -> tuple[WorkerMetadata, ...]:
        """Returns what others need to reach this worker: one entry for each rank, in rank order."""

    async def import_metadata(self, metadata: Sequence[WorkerMetadata]) -> tuple[Imported, ...]:
        """Makes remote workers' layouts usable as handles: entry i goes to rank i; as many entries as ranks."""

    async def connect_remote(
        self, instance_id: str, metadata: Sequence[WorkerMetadata], engines: Sequence[str] = ()
    ) -> tuple[RemoteLayout, ...]:
        """Connects to a remote group: atomic, idempotent for equal metadata, a newer epoch replaces.

        Args:
            instance_id: the remote group.
            metadata: every remote rank that is to be reached.
            engines: engines that may be used, best first; empty: all, in the worker's order.
        """

    async def disconnect_remote(self, instance_id: str) -> bool:
        """Forgets a remote group once no byte of it can land; says whether it was connected."""

    async def has_remote_metadata(self, instance_id: str) -> RemoteState:
        """Says whether a remote group is connected; true only when transfers would be accepted."""

    def execute_local_transfer(
        self,
        source: LocalLayout,
        destination: LocalLayout,
        source_blocks: Iterable[int],
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """Copies blocks between two of the worker's layouts; pair i is source block i and destination block i."""

    def execute_remote_onboard(
        self,
        source: RemoteDescriptor,
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """Pulls blocks of an imported layout, or stored objects."""

    def execute_remote_offload(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        destination: RemoteDescriptor,
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """Pushes blocks into an imported layout, or into stored objects."""

    def execute_remote_onboard_for_instance(
        self,
        instance_id: str,
        remote_tier: Tier,
        source_blocks: Iterable[int],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """Pulls blocks of a connected group: each rank the blocks of its counterpart, or its part of several."""

    async def has_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> PresenceReport:
        """Says for each key whether the object tier holds a whole object of this layout."""

    async def put_blocks(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        keys: Sequence[bytes],
        lock_validity_s: float | None = None,
        timeout_s: float = 60.0,
    ) -> KeyReport:
        """Stores blocks as objects, each under its key.

        Args:
            source: layout to read.
            source_blocks: as many as keys.
            keys: each once.
            lock_validity_s: how long another group's claim to a key is respected; None: no claims are made.
            timeout_s: time until the deadline.
        """

    async def get_blocks(
        self,
        keys: Sequence[bytes],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        timeout_s: float = 60.0,
    ) -> KeyReport:
        """Loads objects into blocks; destination blocks are as many as keys, each once."""

    async def remove_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> KeyReport:
        """Removes the objects of keys, whole or not; a key that is not stored is done."""


class RankWorker(BlockWorker, Protocol):
    """A single worker: what a group drives."""

    def execute_remote_pull(self, plan: PullPlan, options: TransferOptions = DEFAULT_OPTIONS) -> Notification:
        """Pulls parts of blocks from several ranks of a connected group."""
