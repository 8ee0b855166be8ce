"""What a worker exports for engine "nixl": NIXL's own metadata, and where its layouts lie.  [core]

NIXL takes damaged metadata without a word, or refuses it so late that good metadata of the same peer is refused ever
after. So it sees nothing before length, checksum and shape of all of this have been checked here.

On the wire, little-endian: magic, version, number of layouts, flags, incarnation, length of the rest, and CRC-32 of all
else; then the agent's name and metadata, each with its length; then the layouts.
"""

import struct
import zlib
from dataclasses import dataclass

from ayni.blocks.layouts import LayoutHandle
from ayni.errors import BadRequest, Checksum, Incompatible

VERSION = 1

_MAGIC = b"AYNX"
_HEAD = struct.Struct("<4sHHIQI")
_LAYOUT = struct.Struct("<QQBIH")
_ALLOCATION = struct.Struct("<QQ")
_NUMBER = struct.Struct("<I")
_HEARS = 1
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Regions:
    """Where the allocations of one layout lie."""

    is_device: bool
    """In the memory of an accelerator."""
    ordinal: int = 0
    """Which accelerator."""
    allocations: tuple[tuple[int, int], ...]
    """Address and length of each, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """What one worker exports."""

    incarnation: int
    """Random number of the engine's start, 64 bits."""
    agent: str
    """Name of the agent that owns the memory."""
    metadata: bytes
    """The agent's own; opaque."""
    hears: bool
    """Whether the worker is told of notifications that come with a push."""
    layouts: tuple[tuple[LayoutHandle, Regions], ...]


def encode(envelope: Envelope) -> bytes:
    """Returns an envelope as bytes."""
    body = b"".join(
        (
            _with_length(envelope.agent.encode()),
            _with_length(envelope.metadata),
            *(_encode_layout(handle, regions) for handle, regions in envelope.layouts),
        )
    )
    flags = _HEARS if envelope.hears else 0
    head = _HEAD.pack(_MAGIC, VERSION, len(envelope.layouts), flags, envelope.incarnation, len(body))
    return head + _NUMBER.pack(zlib.crc32(body, zlib.crc32(head))) + body


def decode(data: bytes, peer: str) -> Envelope:
    """Reads an envelope; `peer` is named in errors.

    Raises:
        BadRequest: it is cut short, too long, or none at all.
        Incompatible: its version is another one.
        Checksum: it was damaged.
    """
    if len(data) > _MAX_BYTES:
        raise _unreadable(peer, f"it has {len(data)} bytes")
    try:
        return _decode(data, peer)
    except (struct.error, UnicodeDecodeError) as error:
        raise _unreadable(peer, str(error)) from None


def _decode(data: bytes, peer: str) -> Envelope:
    magic, version, num_layouts, flags, incarnation, length = _HEAD.unpack_from(data)
    (crc32,) = _NUMBER.unpack_from(data, _HEAD.size)
    if magic != _MAGIC:
        raise _unreadable(peer, "it begins with something else")
    if version != VERSION:
        raise Incompatible(
            f"{peer} exports version {version} for engine nixl; this worker knows {VERSION}",
            field="engines.version",
            coordinator=VERSION,
            worker=version,
        )
    body = data[_HEAD.size + _NUMBER.size :]
    if len(body) != length:
        raise _unreadable(peer, f"{length} bytes were announced and {len(body)} came")
    if (found := zlib.crc32(body, zlib.crc32(data[: _HEAD.size]))) != crc32:
        raise Checksum(
            f"the nixl export of {peer} was damaged on its way",
            name="nixl export",
            expected=f"{crc32:08x}",
            received=f"{found:08x}",
        )
    reader = _Reader(body)
    agent, metadata = reader.text().decode(), reader.text()
    layouts = tuple(reader.layout() for _ in range(num_layouts))
    if reader.left or not (agent and metadata):
        raise _unreadable(peer, "its parts do not add up")
    return Envelope(
        incarnation=incarnation, agent=agent, metadata=metadata, hears=bool(flags & _HEARS), layouts=layouts
    )


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._place

    def text(self) -> bytes:
        (length,) = self._unpack(_NUMBER)
        if length > self.left:
            raise struct.error("a part is cut short")
        self._place += length
        return self._data[self._place - length : self._place]

    def layout(self) -> tuple[LayoutHandle, Regions]:
        owner_id, number, is_device, ordinal, count = self._unpack(_LAYOUT)
        allocations = tuple((address, size) for address, size in (self._unpack(_ALLOCATION) for _ in range(count)))
        regions = Regions(is_device=bool(is_device), ordinal=ordinal, allocations=allocations)
        return LayoutHandle(owner_id=owner_id, number=number), regions

    def _unpack(self, shape: struct.Struct) -> tuple[int, ...]:
        values: tuple[int, ...] = shape.unpack_from(self._data, self._place)
        self._place += shape.size
        return values


def _encode_layout(handle: LayoutHandle, regions: Regions) -> bytes:
    head = (handle.owner_id, handle.number, regions.is_device, regions.ordinal, len(regions.allocations))
    return _LAYOUT.pack(*head) + b"".join(_ALLOCATION.pack(*allocation) for allocation in regions.allocations)


def _with_length(data: bytes) -> bytes:
    return _NUMBER.pack(len(data)) + data


def _unreadable(peer: str, why: str) -> BadRequest:
    return BadRequest(f"the nixl export of {peer} can't be read: {why}", field="engines.data")
