"""Engine "nixl": blocks travel between memories through NIXL and UCX, by RDMA where there is some.  [shell]

Memory with addresses is lent: of the host, and of accelerators. Every peer that holds this worker's metadata can read
and write all of it; UCX knows neither tokens nor encryption, and listens on all network devices unless it is told which
to use. So this engine is used only where it was asked for, and belongs into a network of its own.

Nobody asks the owner while blocks move: that a peer's blocks are not in use otherwise is up to whoever drives both.

Ugly: over TCP, UCX may end the process that owns the memory when a peer dies while it reads from it. With RDMA, and on
one host, the owner has no part in a transfer and does not notice.
"""

import asyncio
import secrets
import zlib
from collections.abc import Callable
from dataclasses import replace

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutDescriptor, LayoutHandle, LayoutKind, StorageKind
from ayni.blocks.messages import error_of
from ayni.blocks.metadata import EngineExport, WorkerMetadata
from ayni.errors import Deadline, IncompatibleLayout, Unsupported
from worker_agent.blocks.engine import Capabilities, Move
from worker_agent.blocks.engines.nixl_agent import NixlSettings, load_library
from worker_agent.blocks.engines.nixl_envelope import Envelope, decode, encode
from worker_agent.blocks.engines.nixl_link import NAME, NixlLink
from worker_agent.blocks.engines.nixl_memory import addressed
from worker_agent.blocks.engines.nixl_owner import NixlOwner
from worker_agent.blocks.engines.warm_up import MOST_WARM_UP_BYTES
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import allocate_host
from worker_agent.blocks.memory import Memory

VERSION = 1


class NixlEngine:
    """Moves blocks through NIXL."""

    name = NAME
    version = VERSION
    capabilities = Capabilities(
        memory=frozenset(StorageKind),
        same_host_only=False,
        can_pull=True,
        can_push=True,
        cancel="none",
        encrypted=False,
    )

    def __init__(self, settings: NixlSettings | None = None) -> None:
        """Loads NIXL. Call it on the running loop.

        Raises:
            Unsupported: it is not installed, or does not work here.
        """
        (settings or NixlSettings()).apply()
        self._library = load_library()
        self._loop = asyncio.get_running_loop()
        self._incarnation = secrets.randbits(64)
        self.on_notify: Callable[[int], None] | None = None
        """Is told, on the loop, the number that came with a peer's push. Peers learn with the export whether it is."""
        self._owner = NixlOwner(self._library, self._incarnation, self._notified)
        self._memories: dict[LayoutHandle, Memory] = {}
        self._links: set[NixlLink] = set()
        self._num_links = 0

    def register(self, handle: LayoutHandle, memory: Memory) -> None:
        """Lends a layout that has addresses, from the next export on."""
        self._memories[handle] = memory
        if (at := addressed(memory)) is not None:
            self._owner.lend(handle, at)

    def deregister(self, handle: LayoutHandle) -> None:
        """Lends a layout no more. Peers must import what is exported next to reach the other layouts again."""
        self._owner.withdraw(handle)
        memory = self._memories.pop(handle, None)
        if memory is not None:
            for link in self._links:
                link.forget_memory(memory)

    def export(self) -> EngineExport | None:
        """Returns how peers reach this worker's memory; None while nothing is lent."""
        envelope = self._owner.envelope(hears=self.on_notify is not None)
        if envelope is None:
            return None
        data = encode(envelope)
        return EngineExport(name=NAME, version=VERSION, data=data, crc32=zlib.crc32(data))

    async def connect(self, peer: WorkerMetadata, export: EngineExport, deadline: float) -> NixlLink:
        """Connects to a peer and reads one block of the first layout that it lends; see `Engine.connect`."""
        name = f"rank {peer.rank} of group {peer.instance_id}"
        envelope = decode(export.data, name)
        layouts = _lent(peer, envelope, name)
        self._num_links += 1
        link = NixlLink(self._library, envelope, name)
        try:
            async with asyncio.timeout_at(deadline):
                await link.open(f"ayni-{self._incarnation:016x}-to-{self._num_links}")
            await _warm_up(link, layouts[0], deadline)
        except TimeoutError:
            link.abandon()
            raise Deadline(f"{name} could not be reached in time", waiting_for=name, timeout="") from None
        except BaseException:
            link.abandon()
            raise
        self._links.add(link)
        return link

    async def close(self) -> None:
        """Ends everything; links are closed before."""
        self._links.clear()
        self._owner.close()

    def _notified(self, number: int) -> None:
        self._loop.call_soon_threadsafe(self._tell, number)

    def _tell(self, number: int) -> None:
        if self.on_notify is not None:
            self.on_notify(number)


def _lent(peer: WorkerMetadata, envelope: Envelope, name: str) -> list[LayoutDescriptor]:
    """Compares where layouts lie with what they are; returns those that are lent.

    Raises:
        Unsupported: there is none.
        IncompatibleLayout: a layout would not fit into its memory.
    """
    regions = dict(envelope.layouts)
    lent = [layout for layout in peer.layouts if layout.handle in regions]
    if not lent:
        raise Unsupported(f"{name} lends no layout through engine nixl", field="engines", detail="no layouts")
    for layout in lent:
        geometry = Geometry(config=layout.config, kind=layout.kind, axis_order=layout.axis_order)
        needed, sizes = geometry.allocation_bytes, [size for _, size in regions[layout.handle].allocations]
        if len(sizes) != len(needed) or any(size < least for size, least in zip(sizes, needed, strict=True)):
            raise IncompatibleLayout(
                f"the {layout.place} of {name} needs allocations of {needed} bytes; it has {sizes}",
                field="allocations",
                source=sizes,
                destination=needed,
            )
    return lent


async def _warm_up(link: NixlLink, remote: LayoutDescriptor, deadline: float) -> None:
    """Reads one block, so that a link that exists works; the first request also makes the connection."""
    one = as_ids([0])
    if remote.config.block_bytes > MOST_WARM_UP_BYTES:
        remote = _first_byte(remote)
    geometry = Geometry(config=replace(remote.config, num_blocks=1, alignment_bytes=1), axis_order=remote.axis_order)
    local = allocate_host(geometry)
    ticket = link.pull(Move(remote=remote, remote_blocks=one, local=local, local_blocks=one, deadline=deadline))
    await asyncio.wait({ticket.outcome})
    for _, failure in ticket.outcome.result().failures:
        raise error_of(failure)
    await asyncio.wait({ticket.quiesced})
    link.forget_memory(local)


def _first_byte(layout: LayoutDescriptor) -> LayoutDescriptor:
    """Returns the first byte of a layout, as if it were a layout. It is read in place, so the peer need not know."""
    config = LayoutConfig(num_blocks=1, num_layers=1, outer_dim=1, page_size=1, inner_dim=1, dtype_width_bytes=1)
    return replace(layout, config=config, kind=LayoutKind.FULLY_CONTIGUOUS, axis_order=AxisOrder.UNKNOWN)
