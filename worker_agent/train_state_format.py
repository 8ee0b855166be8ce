"""The train state as blocks: a manifest, then the bytes of the tensors.  [core]

Block 0 begins with a magic number and the manifest's length; the manifest (JSON) follows and may go on in the next
blocks. The tensors' bytes begin at the first block after it, one after another. Whoever has block 0 can tell whether
the rest belongs to it: the manifest holds a checksum over all of it.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ayni.blocks.layouts import LayoutConfig
from ayni.errors import BadRequest, Checksum, Incompatible

FORMAT = "ayni-train-state-1"

MODEL = "train state"
"""What the blocks of a training agent are of; part of every object's key."""

_HEAD = struct.Struct("<8sQ")
_MAGIC = b"AYNISTAT"
_MAX_MANIFEST_BYTES = 1 << 28

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor's bytes are."""

    name: str
    dtype: str
    """Name in torch, such as "float32"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the first block after the manifest."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a train state consists of."""

    tensors: tuple[TensorEntry, ...]
    facts: Mapping[str, str]
    """What belongs to the state beside tensors: completed steps, task, kind of update, parameter hash."""
    checksum: str
    """XXH3-128 in hex over the tensors' bytes, in order."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How a state is cut into blocks."""

    manifest_blocks: int
    num_blocks: int


def config_of(num_blocks: int, block_bytes: int) -> LayoutConfig:
    """Returns the shape of a train state's layout: opaque bytes."""
    return LayoutConfig(
        num_blocks=num_blocks,
        num_layers=1,
        outer_dim=1,
        page_size=1,
        inner_dim=block_bytes,
        dtype_width_bytes=1,
        alignment_bytes=64,
    )


def describe(arrays: Sequence[tuple[str, str, tuple[int, ...], Bytes]], facts: Mapping[str, str]) -> Manifest:
    """Returns the manifest of tensors, each as (name, dtype, shape, bytes)."""
    entries, offset, digest = [], 0, xxhash.xxh3_128()
    for name, dtype, shape, data in arrays:
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, offset=offset, num_bytes=data.size))
        digest.update(data.data)
        offset += data.size
    return Manifest(tensors=tuple(entries), facts=dict(facts), checksum=digest.hexdigest())


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the manifest with its head."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}).encode()
    return _HEAD.pack(_MAGIC, len(text)) + text


def manifest_bytes(first: bytes) -> int:
    """Returns the bytes of head and manifest, given the first bytes of block 0.

    Raises:
        Incompatible: it is no train state.
    """
    magic, length = _HEAD.unpack(first[: _HEAD.size])
    if magic != _MAGIC or length > _MAX_MANIFEST_BYTES:
        raise Incompatible(
            f"the first block is no train state: it begins with {first[:8]!r}",
            field="magic",
            coordinator=_MAGIC,
            worker=first[:8],
        )
    return _HEAD.size + int(length)


def decode_manifest(data: bytes) -> Manifest:
    """Reads what `encode_manifest` wrote.

    Raises:
        Incompatible: it is of another format.
        BadRequest: it can't be read.
    """
    try:
        values = json.loads(data[_HEAD.size : manifest_bytes(data)])
        if values.pop("format") != FORMAT:
            raise Incompatible("the train state has another format", field="format", coordinator=FORMAT, worker="other")
        tensors = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in values["tensors"])
        return Manifest(tensors=tensors, facts=values["facts"], checksum=values["checksum"])
    except (ValueError, TypeError, KeyError) as error:
        raise BadRequest(f"the manifest of a train state can't be read: {error}", field="manifest") from error


def split(manifest_length: int, payload_bytes: int, block_bytes: int) -> Split:
    """Returns how many blocks manifest and tensors take."""
    manifest_blocks = -(-manifest_length // block_bytes)
    return Split(manifest_blocks=manifest_blocks, num_blocks=manifest_blocks + -(-payload_bytes // block_bytes))


def pack(
    arrays: Sequence[tuple[str, str, tuple[int, ...], Bytes]], facts: Mapping[str, str], block_bytes: int
) -> Bytes:
    """Returns the blocks of a train state, shape [num_blocks, block_bytes]; copies the bytes once."""
    manifest = describe(arrays, facts)
    head = encode_manifest(manifest)
    parts = split(len(head), manifest.payload_bytes, block_bytes)
    blocks = np.zeros(parts.num_blocks * block_bytes, np.uint8)
    blocks[: len(head)] = np.frombuffer(head, np.uint8)
    start = parts.manifest_blocks * block_bytes
    for entry, (_, _, _, data) in zip(manifest.tensors, arrays, strict=True):
        blocks[start + entry.offset : start + entry.offset + entry.num_bytes] = data
    return blocks.reshape(parts.num_blocks, block_bytes)


def unpack(blocks: Bytes) -> tuple[Manifest, list[Bytes]]:
    """Returns the manifest and, for each tensor, a view of its bytes.

    Args:
        blocks: all blocks, shape [num_blocks, block_bytes].

    Raises:
        Incompatible, BadRequest: see `decode_manifest`.
        Checksum: the tensors' bytes are not those that the manifest was written for.
    """
    flat, block_bytes = blocks.reshape(-1), blocks.shape[1]
    length = manifest_bytes(flat[: _HEAD.size].tobytes())
    manifest = decode_manifest(flat[:length].tobytes())
    parts = split(length, manifest.payload_bytes, block_bytes)
    if parts.num_blocks != len(blocks):
        raise BadRequest(
            f"a train state of {parts.num_blocks} blocks was read from a layout of {len(blocks)}", field="num_blocks"
        )
    start = parts.manifest_blocks * block_bytes
    payload = flat[start : start + manifest.payload_bytes]
    found = xxhash.xxh3_128_hexdigest(payload.data)
    if found != manifest.checksum:
        raise Checksum(
            f"the train state behind step {manifest.facts.get('completed_steps', '?')} is damaged or a mixture: its "
            f"bytes hash to {found[:12]}, its manifest says {manifest.checksum[:12]}",
            name="train state",
            expected=manifest.checksum,
            received=found,
        )
    return manifest, [payload[entry.offset : entry.offset + entry.num_bytes] for entry in manifest.tensors]
