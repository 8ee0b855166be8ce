"""Sequence hashes are the same everywhere, name whole prefixes, and go through both of their forms unchanged."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from ayni.blocks.sequence_hash import KEY_BYTES, Schema, SequenceHash, hash_tokens, synthetic
from ayni.errors import BadRequest

U64 = st.integers(0, 2**64 - 1)
BLOCK_SIZES = st.sampled_from([1, 2, 16, 1024, 2**15])
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)
NO_HASHES = [b"", b"x", bytes(KEY_BYTES - 1), bytes(KEY_BYTES + 1)]


@st.composite
def hashes(draw: st.DrawFn) -> SequenceHash:
    position = draw(st.sampled_from([0, 1, 7, 2**32 - 1]))
    return SequenceHash(
        current=draw(U64),
        parent=draw(U64) if position else 0,
        position=position,
        flags=draw(st.sampled_from(Schema)) << 4 | draw(st.integers(0, 15)),
    )


# Frozen: stored objects have these names, so a change of any of them loses what is stored.
GOLDEN = [
    ("0:CWcXu8NnaFS", "a1f8b5f23e31d14400000000000000000000000014000000"),
    ("1:e7M2YKsP2kY:CWcXu8NnaFS", "1199e23a5cd4dcdda1f8b5f23e31d1440100000014000000"),
    ("2:6JpPpDxeci1:e7M2YKsP2kY", "ae38ad70d3c8ba1f1199e23a5cd4dcdd0200000014000000"),
]


def test_golden_tokens():
    links = hash_tokens(range(48), 16)
    assert [(str(link), bytes(link).hex()) for link in links] == GOLDEN
    assert str(hash_tokens(range(16), 16, salt=b"tenant")[0]) == "0:EPEa9XUPNgm"


def test_golden_synthetic():
    assert str(synthetic("run/step-3", 0)) == "0:4GGcrLUnsFb"
    assert bytes(synthetic("run/step-3", 1)).hex() == "6934298dedb9fac12064b8c9d4ca19590100000020000000"


def test_formula_is_the_one_that_is_written_down():
    def words(*values):
        return xxhash.xxh3_64_intdigest(struct.pack("<QQ", *values))

    first, second = hash_tokens(range(32), 16)
    local = [xxhash.xxh3_64_intdigest(struct.pack("<16I", *tokens)) for tokens in (range(16), range(16, 32))]
    assert first.current == words(0, local[0])
    assert second.current == words(first.current, local[1])
    assert (first.parent, second.parent) == (0, first.current)
    assert first.current != local[0], "no salt goes through the formula too"


@given(hashes())
def test_wire_form_and_back(link):
    data = bytes(link)
    assert len(data) == KEY_BYTES
    assert SequenceHash.from_bytes(data) == link


@given(hashes())
def test_text_form_and_back(link):
    assert SequenceHash.from_text(str(link), link.block_size, link.schema) == link


@given(TOKENS, TOKENS, st.sampled_from([b"", b"a", b"b"]))
def test_equal_prefixes_and_only_they_have_equal_hashes(tokens, others, salt):
    size = 16
    mine, theirs = hash_tokens(tokens, size, salt), hash_tokens(others, size, salt)
    assert len(mine) == len(tokens) // size
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        stop = (place + 1) * size
        assert (one == other) == (tokens[:stop] == others[:stop])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32))
def test_salt_separates_and_chain_goes_on(tokens):
    plain, salted = hash_tokens(tokens, 16), hash_tokens(tokens, 16, salt=b"tenant")
    assert {link.current for link in plain}.isdisjoint(link.current for link in salted)
    assert [link.position for link in plain] == [0, 1]
    assert hash_tokens(tokens[:16], 16) == plain[:1]


@given(U64, U64, BLOCK_SIZES)
def test_extending_keeps_size_and_schema(local, following, size):
    root = SequenceHash.root(local, size)
    link = root.extend(following)
    assert (link.block_size, link.schema, link.position) == (size, Schema.CANONICAL, 1)
    assert link.parent == root.current


@given(st.text(max_size=8), st.text(max_size=8), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_synthetic_keys_differ_by_name_and_number(name, other, index, place):
    assume((name, index) != (other, place))
    assert synthetic(name, index) == synthetic(name, index)
    assert synthetic(name, index) != synthetic(other, place)
    assert str(synthetic(name, index)) != str(synthetic(other, place))
    assert synthetic(name, index).schema is Schema.SYNTHETIC


def test_tokens_may_be_any_array_of_integers():
    expected = hash_tokens(list(range(40)), 16)
    assert all(
        hash_tokens(np.arange(40, dtype=dtype), 16) == expected  # type: ignore[arg-type]
        for dtype in (np.uint8, np.int32, np.int64, np.uint32)
    )


def test_position_does_not_wrap():
    last = SequenceHash(current=1, parent=2, position=2**32 - 1, flags=0x14)
    with pytest.raises(BadRequest, match="do not fit"):
        last.extend(3)


@pytest.mark.parametrize("size", [0, 3, 8, 15, 17, 1000, 2048, -16])
def test_block_sizes_that_are_refused(size):
    with pytest.raises(BadRequest, match=f"a block of {size} tokens"):
        hash_tokens(range(4096), size)


@pytest.mark.parametrize("size", [0, 3, 2**16])
def test_constructor_takes_powers_of_two_only(size):
    with pytest.raises(BadRequest, match="power of two"):
        SequenceHash.root(1, size)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], ["a"]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(BadRequest, match="tokens must be integers"):
        hash_tokens(tokens * 16, 16)


@pytest.mark.parametrize("data", NO_HASHES, ids=len)
def test_keys_of_another_length_are_refused(data):
    with pytest.raises(BadRequest, match=f"24 bytes, not {len(data)}"):
        SequenceHash.from_bytes(data)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"flags": 0}, "schema"),
        ({"flags": 0x30}, "schema"),
        ({"flags": 0x1014}, "schema"),
        ({"parent": 1}, "a root has none"),
        ({"position": -1}, "do not fit"),
        ({"current": 2**64}, "do not fit"),
        ({"position": 2**32}, "do not fit"),
    ],
)
def test_fields_that_are_refused(values, why):
    with pytest.raises(BadRequest, match=why) as caught:
        SequenceHash(**({"current": 5, "flags": 0x14} | values))
    assert caught.value.metadata == {"field": "keys"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0:",
        "0:CWcXu8NnaFS:CWcXu8NnaFS",
        "00:CWcXu8NnaFS",
        "+1:e7M2YKsP2kY:CWcXu8NnaFS",
        "1:e7M2YKsP2kY",
        "1:e7M2YKsP2kY:CWcXu8NnaFS:x",
        "x:CWcXu8NnaFS",
        "0:CWcXu8NnaFS0",
        "0:CWcXu8Nna",
        "0:../CWcXu8Nn",
        f"{2**32}:e7M2YKsP2kY:CWcXu8NnaFS",
    ],
)
def test_texts_that_are_refused(text):
    with pytest.raises(BadRequest):
        SequenceHash.from_text(text, 16)
