"""Engine "grpc": blocks travel through the workers' own service.  [shell]

It works wherever a worker can be dialled, with every kind of memory, encrypted where the service is. Nothing has to be
registered: the owner's service looks layouts up and holds the blocks while they are read or written.
"""

import asyncio
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LayoutDescriptor, LayoutHandle, StorageKind
from ayni.blocks.messages import error_of
from ayni.blocks.metadata import EngineExport, WorkerMetadata
from ayni.channels import HeaderChannel, open_channel
from ayni.endpoints import ClientTls, Keepalive, parse_address
from ayni.errors import AyniError, BadRequest, BlockBusy, Checksum, StorageFailed, Unsupported
from ayni.settings import SettingsError
from worker_agent.blocks.engine import Capabilities, Move
from worker_agent.blocks.engines.grpc_link import NAME, GrpcLink
from worker_agent.blocks.engines.warm_up import MOST_WARM_UP_BYTES
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import allocate_host
from worker_agent.blocks.memory import Memory

VERSION = 1

_MOST_EXPORT_BYTES = 4096
_ANSWERS = frozenset({BlockBusy.reason, Checksum.reason, StorageFailed.reason})


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """Who passes a peer's reads on, because nobody can dial the peer."""

    address: str
    """host:port; trusted as the authority in `Dialling.tls` says."""
    headers: Mapping[str, str] = field(repr=False)
    """Metadata of every call: which peer is meant, and who asks."""


Relays = dict[int, Relay]
"""By the peer's incarnation. What a peer exports never tells who passes its reads on, nor what is sent along."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialling:
    """How this worker dials others."""

    token: str = field(repr=False)
    """Join token."""
    tls: ClientTls = field(default_factory=ClientTls)
    """Whom to trust, for peers whose service speaks TLS."""
    insecure: bool = False
    """Dial peers that speak in clear although others may read along."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    """When a silent peer is taken for lost."""
    relays: Relays = field(default_factory=dict)
    """Peers that are reached through somebody else from now on."""


class GrpcEngine:
    """Moves blocks through WorkerService."""

    name = NAME
    version = VERSION

    def __init__(self, dialling: Dialling) -> None:
        """Can reach peers; is reached itself once it is told where, see `serve_at`."""
        self._dialling = dialling
        self._export: EngineExport | None = None
        self.capabilities = Capabilities(
            memory=frozenset(StorageKind),
            same_host_only=False,
            can_pull=True,
            can_push=True,
            cancel="drain",
            encrypted=dialling.tls.is_on,
        )

    def serve_at(self, address: str, is_tls: bool) -> None:
        """Says where peers can dial this worker's service, as host:port, and whether it speaks TLS."""
        data = json.dumps({"address": address, "tls": is_tls}).encode()
        self._export = EngineExport(name=NAME, version=VERSION, data=data, crc32=zlib.crc32(data))

    def register(self, handle: LayoutHandle, memory: Memory) -> None:
        """Does nothing: the service lends all layouts."""

    def deregister(self, handle: LayoutHandle) -> None:
        """Does nothing: the service knows which layouts there are."""

    def export(self) -> EngineExport | None:
        """Returns where peers can dial this worker; None before `serve_at`."""
        return self._export

    async def connect(self, peer: WorkerMetadata, export: EngineExport, deadline: float) -> GrpcLink:
        """Connects to a peer and reads one block of its first layout; see `Engine.connect`."""
        name = f"rank {peer.rank} of group {peer.instance_id}"
        if relay := self._dialling.relays.get(peer.incarnation):
            name += f" through {relay.address}"
            channel = self._open(relay.address, self._dialling.tls.is_on, name)
            channel.headers.update(relay.headers)
        else:
            address, is_tls = _read_export(export.data)
            name += f" at {address}"
            channel = self._open(address, is_tls, name)
        link = GrpcLink(channel, peer.incarnation, name)
        try:
            await _warm_up(link, peer, deadline)
        except BaseException:
            await link.close()
            raise
        return link

    async def close(self) -> None:
        """Does nothing: links have channels of their own."""

    def _open(self, address: str, is_tls: bool, peer: str) -> HeaderChannel:
        dialling = self._dialling
        if is_tls and not dialling.tls.is_on:
            raise _unreachable(peer, "it speaks TLS, and this worker knows no authority to trust: give --tls-ca")
        tls = dialling.tls if is_tls else None
        try:
            return open_channel(address, dialling.token, tls, dialling.insecure, keepalive=dialling.keepalive)
        except SettingsError as error:
            raise _unreachable(peer, str(error)) from None


async def _warm_up(link: GrpcLink, peer: WorkerMetadata, deadline: float) -> None:
    """Reads one block, so that a link that exists works, and its first move does not wait for the connection.

    A large block is asked for, and not read.
    """
    if not peer.layouts:
        return
    remote = peer.layouts[0]
    try:
        if remote.config.block_bytes > MOST_WARM_UP_BYTES:
            await link.ask(remote, deadline)
        else:
            await _read_one(link, remote, deadline)
    except AyniError as error:
        # Whoever says that a block is busy, or can't be read, has been reached, and asked, and has answered.
        if error.reason not in _ANSWERS:
            raise


async def _read_one(link: GrpcLink, remote: LayoutDescriptor, deadline: float) -> None:
    one = as_ids([0])
    geometry = Geometry(config=replace(remote.config, num_blocks=1, alignment_bytes=1), axis_order=remote.axis_order)
    local = allocate_host(geometry)
    ticket = link.pull(Move(remote=remote, remote_blocks=one, local=local, local_blocks=one, deadline=deadline))
    await asyncio.wait([ticket.quiesced])
    for _, failure in ticket.outcome.result().failures:
        raise error_of(failure)


def _read_export(data: bytes) -> tuple[str, bool]:
    """Returns address and whether it speaks TLS."""
    try:
        if len(data) > _MOST_EXPORT_BYTES:
            raise ValueError("it is too long")
        content = json.loads(data)
        address, is_tls = content["address"], content["tls"]
        if not (isinstance(address, str) and isinstance(is_tls, bool)):
            raise ValueError("its values have other types")
        return str(parse_address(address)), is_tls
    except (ValueError, KeyError, TypeError, RecursionError, SettingsError) as error:
        raise BadRequest(f"a peer's grpc export can't be read: {error}", field="engines.data") from None


def _unreachable(peer: str, why: str) -> Unsupported:
    return Unsupported(f"engine grpc can't reach {peer}: {why}", field="engines", detail=why)
