"""What a slab file says about itself: its header page, and one slot for each block.  [core]

    page 0       magic, version, CRC-32 and length of the text, then the text: JSON with the fields of `SlabHeader`
    from 4096    slots, 16 bytes for each block: state, check value of the slot, checksum of the block
    data offset  the layout's allocations, one after another, each at a multiple of 4096 and of the layout's alignment

All integers are little-endian. A file of nothing but zeros is one whose making was cut short.

A slot is written after the bytes of its block. States: NEVER (zeros: not written since the file was made), WHOLE (the
checksum is that of the block), PARTS (some of a WHOLE block was written since; no checksum), SOME (some of a NEVER
block was written; no checksum), TORN (a write failed, or the owner ended while the block was PARTS or SOME). A block
whose owner ended between bytes and slot is WHOLE with the checksum of other bytes, and is found when it is read. A slot
whose check value is not its own counts as TORN: what it says of its block is not known.
"""

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt
import xxhash

from ayni.blocks.ids import Ids
from ayni.errors import IncompatibleLayout, StorageFailed
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Bytes

PAGE_BYTES = 4096
NEVER, WHOLE, PARTS, TORN, SOME = range(5)
SLOT = np.dtype([("state", "<u4"), ("check", "<u4"), ("checksum", "<u8")])
Slots = npt.NDArray[np.void]
"""Shape [B], dtype SLOT."""

_MAGIC = b"AYNISLAB"
_VERSION = 2
_FRONT = struct.Struct("<8sIII")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabHeader:
    """Whose blocks a slab holds, and of which shape."""

    fingerprint: str
    """Of the layout; see `ayni.blocks.layouts.fingerprint`."""
    kind: str
    num_blocks: int
    block_bytes: int
    alignment_bytes: int
    instance_id: str
    """Group of the owner."""
    rank: int
    """Rank of the owner in its group."""
    clean: bool = False
    """Whether the owner closed the file."""

    @classmethod
    def of(cls, geometry: Geometry, fingerprint: str, instance_id: str, rank: int) -> "SlabHeader":
        """Returns the header for a layout and its owner."""
        config = geometry.config
        return cls(
            fingerprint=fingerprint,
            kind=geometry.kind.value,
            num_blocks=config.num_blocks,
            block_bytes=config.block_bytes,
            alignment_bytes=config.alignment_bytes,
            instance_id=instance_id,
            rank=rank,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlabPlaces:
    """Where things lie in a slab file, in bytes from its beginning."""

    allocations: tuple[int, ...]
    end: int
    """Size of the file."""


_FIELDS = tuple(field.name for field in fields(SlabHeader) if field.name != "clean")
_OWNER = {"instance_id", "rank"}


def places(geometry: Geometry) -> SlabPlaces:
    """Returns where the allocations of a layout lie in its slab."""
    unit = max(PAGE_BYTES, geometry.config.alignment_bytes)
    end = PAGE_BYTES + geometry.config.num_blocks * SLOT.itemsize
    starts = []
    for size in geometry.allocation_bytes:
        starts.append(-(-end // unit) * unit)
        end = starts[-1] + size
    return SlabPlaces(allocations=tuple(starts), end=end)


def encode(header: SlabHeader) -> bytes:
    """Returns the header page."""
    text = json.dumps(asdict(header)).encode()
    assert _FRONT.size + len(text) <= PAGE_BYTES, "a slab header is larger than its page"
    return (_FRONT.pack(_MAGIC, _VERSION, zlib.crc32(text), len(text)) + text).ljust(PAGE_BYTES, b"\0")


def decode(page: bytes, place: str) -> SlabHeader | None:
    """Returns what a header page says; None when it is all zeros, or empty.

    Args:
        page: the first bytes of the file.
        place: the file's name, for the error.

    Raises:
        StorageFailed: the file is no slab, a slab of another version, too short, or its header is damaged.
    """
    if not any(page):
        return None
    if len(page) < PAGE_BYTES or not page.startswith(_MAGIC):
        raise refused(place, "it is not a slab file")
    _, version, checksum, length = _FRONT.unpack_from(page)
    if version != _VERSION:
        raise refused(place, f"it has version {version} of the slab format; this program reads version {_VERSION}")
    text = page[_FRONT.size : _FRONT.size + length]
    if zlib.crc32(text) != checksum:
        raise refused(place, "its header is damaged")
    return _parse(text, place)


def _parse(text: bytes, place: str) -> SlabHeader:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    wanted = {field.name: field.type for field in fields(SlabHeader)}
    found = {name: type(value) for name, value in values.items()} if isinstance(values, dict) else None
    if found != wanted:
        raise refused(place, f"its header does not have the fields of version {_VERSION} of the slab format")
    return SlabHeader(**values)


def check_same(found: SlabHeader, wanted: SlabHeader, place: str) -> None:
    """Refuses a slab that holds other blocks than are wanted; names each field that differs, with both values.

    Raises:
        IncompatibleLayout: blocks of another shape, or another number of them.
        StorageFailed: blocks of another owner.
    """
    unlike = [name for name in _FIELDS if getattr(found, name) != getattr(wanted, name)]
    texts = [f"{name} is {getattr(found, name)!r}, not {getattr(wanted, name)!r}" for name in unlike]
    error = refused(place, f"it holds other blocks: {'; '.join(texts)}")
    if set(unlike) - _OWNER:
        name = unlike[0]
        sides = {"source": getattr(found, name), "destination": getattr(wanted, name)}
        raise IncompatibleLayout(error.message, field=name, **sides)
    if unlike:
        raise error


def refused(place: str, detail: str, remedy: str = "move it away") -> StorageFailed:
    """Returns the error for a slab file that can't be used."""
    return StorageFailed(
        f"the slab file {place} can't be used: {detail}; {remedy}, or use another folder",
        place=place,
        detail=detail,
    )


def checks_of(ids: Ids, slots: Slots) -> npt.NDArray[np.uint32]:
    """Returns the check values of the slots of blocks: 32 bits mixed from all else that a slot says, and whose it is.

    Args:
        ids: the blocks.
        slots: their slots.
    """
    odd = np.uint64(0x9E3779B97F4A7C15)
    word = (ids.astype(np.uint64) << np.uint64(3)) + slots["state"]
    mixed = slots["checksum"] ^ (word * odd)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    checks: npt.NDArray[np.uint32] = (mixed >> np.uint64(32)).astype(np.uint32)
    return checks


def unsound(slots: Slots) -> npt.NDArray[np.bool_]:
    """Says of all slots of a slab whether one is neither zeros nor has its own check value and a known state."""
    is_blank = (slots["state"] == 0) & (slots["check"] == 0) & (slots["checksum"] == 0)
    is_known = (slots["state"] != NEVER) & (slots["state"] <= SOME)
    wrong: npt.NDArray[np.bool_] = ~is_blank & ~(is_known & (slots["check"] == checks_of(np.arange(len(slots)), slots)))
    return wrong


def checksum_of(block: int, data: Bytes) -> int:
    """Returns 64 bits of XXH3 over a block; the block's id is part of it, so that a misplaced block does not pass."""
    return xxhash.xxh3_64_intdigest(data.data, seed=block)


def checksums_of(blocks: Sequence[int], rows: Bytes) -> list[int]:
    """Returns the checksums of blocks, one for each row of `rows`."""
    return [checksum_of(block, row) for block, row in zip(blocks, rows, strict=True)]
