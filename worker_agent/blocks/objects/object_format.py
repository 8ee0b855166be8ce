"""What a stored object looks like: a header that says which block it is, and the block's bytes.  [core]

Legend: n payload bytes. The payload is the block's string in the layout's axis order, gaps left out, so layouts of
equal fingerprint exchange objects, however their regions are arranged.

    bytes        field
    0 to 7       magic
    8 to 9       version
    10 to 11     kind of checksum; 1 is xxh3-64 with seed 0
    12 to 15     rank
    16 to 23     n
    24 to 55     layout fingerprint
    56 to 79     sequence hash, in its wire form
    80 to 87     checksum of bytes 0 to 79 and of the payload
    88 to 87+n   payload

All numbers are little-endian. An object that is not exactly what its key promises is as good as absent; why is kept
apart, since a short object, another layout's object and a damaged one have different causes.
"""

import struct
from dataclasses import dataclass
from enum import Enum

import xxhash

from ayni.blocks.sequence_hash import SequenceHash
from ayni.blocks.transfers import Failure
from ayni.errors import UnknownObject

HEADER_BYTES = 88

_MAGIC = b"AYNIBLK\n"
_VERSION = 1
_XXH3_64 = 1
_HEADER = struct.Struct("<8sHHIQ32s24sQ")
_SIGNED_BYTES = HEADER_BYTES - 8
_FIELDS = ("magic", "version", "checksum_kind", "rank", "payload_bytes", "fingerprint", "key", "checksum")


class Flaw(Enum):
    """Why an object is not the one that was asked for."""

    SHORT = "short"
    LONG = "long"
    """Somebody else's, since what this program leaves unfinished is short."""
    MAGIC = "magic"
    """Somebody else's file."""
    VERSION = "version"
    """Written by another version of this program, or with another kind of checksum."""
    FINGERPRINT = "fingerprint"
    RANK = "rank"
    KEY = "key"
    CHECKSUM = "checksum"

    @property
    def is_ours(self) -> bool:
        """Whether the object is a spoiled one of this key, which may be replaced; others may be somebody's."""
        return self in (Flaw.SHORT, Flaw.CHECKSUM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What an object must say of itself."""

    fingerprint: str
    """Of the layout, 64 hexadecimal digits."""
    rank: int
    key: SequenceHash
    payload_bytes: int

    @property
    def object_bytes(self) -> int:
        """Bytes of the whole object."""
        return HEADER_BYTES + self.payload_bytes


def write_header(data: memoryview, identity: Identity) -> None:
    """Fills in the header of an object whose payload is already in place.

    Args:
        data: the whole object.
        identity: what it is.
    """
    assert len(data) == identity.object_bytes
    data[:HEADER_BYTES] = _pack(identity, 0)
    data[:HEADER_BYTES] = _pack(identity, _checksum(data))


def flaw_of_size(object_bytes: int, identity: Identity) -> Flaw | None:
    """Says what is wrong with an object's size."""
    if object_bytes == identity.object_bytes:
        return None
    return Flaw.SHORT if object_bytes < identity.object_bytes else Flaw.LONG


def flaw_of(data: memoryview, identity: Identity) -> Flaw | None:
    """Says what is wrong with an object, the most telling first: not ours, another block's, cut, damaged.

    Args:
        data: the whole object.
        identity: what it must be.
    """
    start = bytes(data[: len(_MAGIC)])
    if data and not any(data[:HEADER_BYTES]):
        # What a loss of power leaves of a file whose bytes had not reached the disk.
        return flaw_of_size(len(data), identity) or Flaw.CHECKSUM
    if not data or start != _MAGIC[: len(start)]:
        return Flaw.MAGIC if data else Flaw.SHORT
    if len(data) < HEADER_BYTES:
        return Flaw.SHORT
    found = dict(zip(_FIELDS, _HEADER.unpack_from(data), strict=True))
    return _flaw_of_fields(found, identity) or flaw_of_size(len(data), identity) or _flaw_of_checksum(data, found)


def failure_of(flaw: Flaw, name: str, identity: Identity) -> Failure:
    """Returns what callers are told about an object with a flaw.

    Args:
        flaw: what is wrong.
        name: what the object is called in its store.
        identity: what it should have been.
    """
    return _failure("counts as absent", flaw, name, identity)


def refusal_of(flaw: Flaw, name: str, identity: Identity) -> Failure:
    """Returns what callers are told would store an object where somebody else's is; otherwise as `failure_of`."""
    return _failure("is in the way and was left as it is", flaw, name, identity)


def _failure(what: str, flaw: Flaw, name: str, identity: Identity) -> Failure:
    message = f"the object {name} {what}: {_sentence(flaw, identity)}"
    return Failure.of(UnknownObject(message, key=identity.key, detail=flaw.value))


def _sentence(flaw: Flaw, identity: Identity) -> str:
    match flaw:
        case Flaw.SHORT:
            return f"it has fewer bytes than the {identity.object_bytes} of a whole one; store it again"
        case Flaw.LONG:
            return f"it has more bytes than the {identity.object_bytes} of a whole one; delete it and store it again"
        case Flaw.CHECKSUM:
            return "its bytes do not match their checksum; store it again"
        case Flaw.MAGIC:
            return "it was not written by this program; delete it or use another prefix"
        case Flaw.VERSION:
            return "it has a version that this program can't read; delete it or use another prefix for other versions"
        case _:
            return f"it says another {flaw.value} than its name does; somebody moved it there; delete it"


def _flaw_of_fields(found: dict[str, object], identity: Identity) -> Flaw | None:
    expected = {
        Flaw.VERSION: (found["version"], found["checksum_kind"]) == (_VERSION, _XXH3_64),
        Flaw.FINGERPRINT: found["fingerprint"] == bytes.fromhex(identity.fingerprint),
        Flaw.RANK: found["rank"] == identity.rank,
        Flaw.KEY: found["key"] == bytes(identity.key),
        # Equal fingerprints mean equal sizes, so a header that has another size is damaged.
        Flaw.CHECKSUM: found["payload_bytes"] == identity.payload_bytes,
    }
    return next((flaw for flaw, fits in expected.items() if not fits), None)


def _flaw_of_checksum(data: memoryview, found: dict[str, object]) -> Flaw | None:
    return None if found["checksum"] == _checksum(data) else Flaw.CHECKSUM


def _pack(identity: Identity, checksum: int) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        _VERSION,
        _XXH3_64,
        identity.rank,
        identity.payload_bytes,
        bytes.fromhex(identity.fingerprint),
        bytes(identity.key),
        checksum,
    )


def _checksum(data: memoryview) -> int:
    digest = xxhash.xxh3_64(data[:_SIGNED_BYTES])
    digest.update(data[HEADER_BYTES:])
    return digest.intdigest()
