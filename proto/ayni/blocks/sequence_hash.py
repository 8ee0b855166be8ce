"""Sequence hashes: keys that name the tokens of a block together with all tokens before them.  [core]

A chain starts at a root and is extended block by block; each link hashes the link before it and the block's own tokens,
so equal hashes mean equal prefixes. Every hash is xxh3-64 with seed 0 over little-endian words, so that any process, on
any machine, in any language, comes to the same keys.

Two forms: 24 bytes on the wire (little-endian), and a text, which names objects. The text leaves the flags out: block
size and schema are the same for all blocks of one layout.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import base58
import numpy as np
import numpy.typing as npt
import xxhash

from ayni.errors import BadRequest

KEY_BYTES = 24
"""Length of the wire form."""

MIN_TOKENS, MAX_TOKENS = 16, 1024
"""Smallest and largest block that `hash_tokens` takes: below, keys outweigh blocks; above, little is ever reused."""

_WIRE = struct.Struct("<QQII")
_MAX_U32, _MAX_U64 = (1 << 32) - 1, (1 << 64) - 1
_NO_SALT = 0


class Schema(IntEnum):
    """What a sequence hash was made from."""

    CANONICAL = 1
    """Tokens."""
    SYNTHETIC = 2
    """A name and a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceHash:
    """One link of a chain of blocks.

    Raises:
        BadRequest: a field breaks its rule.
    """

    current: int
    """Hash of this block and all before it; unsigned, 64 bits."""
    parent: int = 0
    """`current` of the block before; 0 at position 0."""
    position: int = 0
    """Place in the chain; unsigned, 32 bits."""
    flags: int
    """Bits 0 to 3: logarithm of the tokens of a block to base 2. Bits 4 to 11: schema. The others are zero."""

    def __post_init__(self) -> None:
        """Checks every rule."""
        if not (0 <= self.current <= _MAX_U64 and 0 <= self.parent <= _MAX_U64 and 0 <= self.position <= _MAX_U32):
            raise _bad(f"{self.current}, {self.parent}, {self.position} do not fit into 64, 64 and 32 bits")
        if self.position == 0 and self.parent:
            raise _bad(f"position 0 has the parent {self.parent:#x}; a root has none")
        if not 0 <= self.flags <= _MAX_U32 or self.flags >> 4 not in tuple(Schema):
            raise _bad(f"the flags {self.flags:#x} name no schema that this version knows")

    @classmethod
    def root(cls, local_hash: int, block_size: int, salt: int = _NO_SALT) -> "SequenceHash":
        """Returns the first link of a chain.

        Args:
            local_hash: hash of the block's own tokens.
            block_size: tokens of a block; a power of two, at most 2**15.
            salt: keeps chains of different users or models apart; 0 is the salt of those who have none.
        """
        return cls(current=_hash_words(salt, local_hash), flags=_flags(block_size, Schema.CANONICAL))

    @classmethod
    def from_bytes(cls, data: bytes) -> "SequenceHash":
        """Returns the hash that a wire form stands for."""
        if len(data) != KEY_BYTES:
            raise _bad(f"a key has {KEY_BYTES} bytes, not {len(data)}")
        current, parent, position, flags = _WIRE.unpack(data)
        return cls(current=current, parent=parent, position=position, flags=flags)

    @classmethod
    def from_text(cls, text: str, block_size: int, schema: Schema = Schema.CANONICAL) -> "SequenceHash":
        """Returns the hash that a text stands for; block size and schema are not part of texts."""
        position, *words = text.split(":")
        if len(words) not in (1, 2) or not (position.isascii() and position.isdecimal()):
            raise _bad(f"{text!r} is not position:hash or position:hash:parent")
        current, parent = (_from_base58(word, text) for word in (*words, _base58(0))[:2])
        value = cls(current=current, parent=parent, position=int(position), flags=_flags(block_size, schema))
        if str(value) != text:
            raise _bad(f"{text!r} is not written as {str(value)!r}")
        return value

    def extend(self, local_hash: int) -> "SequenceHash":
        """Returns the next link: that of the block which follows.

        Raises:
            BadRequest: the chain has 2**32 links already.
        """
        return SequenceHash(
            current=_hash_words(self.current, local_hash),
            parent=self.current,
            position=self.position + 1,
            flags=self.flags,
        )

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return 1 << (self.flags & 15)

    @property
    def schema(self) -> Schema:
        """What the hash was made from."""
        return Schema(self.flags >> 4)

    def __bytes__(self) -> bytes:
        return _WIRE.pack(self.current, self.parent, self.position, self.flags)

    def __str__(self) -> str:
        parent = f":{_base58(self.parent)}" if self.position else ""
        return f"{self.position}:{_base58(self.current)}{parent}"


def hash_tokens(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[SequenceHash]:
    """Returns one hash for each full block of tokens, in order; what is left over has none.

    Args:
        tokens: unsigned, 32 bits each.
        block_size: tokens of a block; a power of two from MIN_TOKENS to MAX_TOKENS.
        salt: keeps chains of different users or models apart; empty means none.

    Raises:
        BadRequest: the block size or a token breaks its rule.
    """
    if not MIN_TOKENS <= block_size <= MAX_TOKENS:
        raise _bad(f"a block of {block_size} tokens; it must have {MIN_TOKENS} to {MAX_TOKENS}")
    words = _as_tokens(tokens)
    whole = words[: len(words) - len(words) % block_size].reshape(-1, block_size)
    salt_word = xxhash.xxh3_64_intdigest(salt) if salt else _NO_SALT
    return _chain((xxhash.xxh3_64_intdigest(block.tobytes()) for block in whole), block_size, salt_word)


def synthetic(name: str, index: int) -> SequenceHash:
    """Returns the key of the block with this number of something that is not tokens, such as a checkpoint.

    The name's hash takes the place of the parent, so keys of one name belong together.
    """
    if not 0 <= index <= _MAX_U32:
        raise _bad(f"number {index} of {name!r} does not fit into 32 bits")
    family = xxhash.xxh3_64_intdigest(name.encode())
    flags = _flags(1, Schema.SYNTHETIC)
    parent = family if index else 0
    return SequenceHash(current=_hash_words(family, index), parent=parent, position=index, flags=flags)


def _chain(local_hashes: Iterable[int], block_size: int, salt: int) -> list[SequenceHash]:
    links: list[SequenceHash] = []
    for local_hash in local_hashes:
        links.append(links[-1].extend(local_hash) if links else SequenceHash.root(local_hash, block_size, salt))
    return links


def _as_tokens(tokens: Sequence[int]) -> npt.NDArray[np.uint32]:
    values = np.asarray(tokens)
    if values.size and (values.dtype.kind not in "iu" or values.min() < 0 or values.max() > _MAX_U32):
        raise _bad("tokens must be integers from 0 to 2**32 - 1")
    return values.astype("<u4").reshape(-1)


def _flags(block_size: int, schema: Schema) -> int:
    if block_size < 1 or block_size & (block_size - 1) or block_size > 1 << 15:
        raise _bad(f"a block of {block_size} tokens; it must have a power of two, at most {1 << 15}")
    return block_size.bit_length() - 1 | schema << 4


def _hash_words(first: int, second: int) -> int:
    if not (0 <= first <= _MAX_U64 and 0 <= second <= _MAX_U64):
        raise _bad(f"the words {first} and {second} do not fit into 64 bits")
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", first, second))


def _base58(word: int) -> str:
    return base58.b58encode(word.to_bytes(8, "big")).decode()


def _from_base58(word: str, text: str) -> int:
    try:
        data = base58.b58decode(word)
    except ValueError:
        raise _bad(f"{text!r} has a letter that is not in base58") from None
    if len(data) != 8:
        raise _bad(f"{text!r} has a part of {len(data)} bytes; each must have 8")
    return int.from_bytes(data, "big")


def _bad(why: str) -> BadRequest:
    return BadRequest(f"this is no sequence hash: {why}", field="keys")
