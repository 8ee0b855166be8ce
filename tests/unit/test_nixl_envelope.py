"""What a worker exports for engine nixl: nothing damaged gets past it."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.blocks.layouts import LayoutHandle
from ayni.errors import AyniError, BadRequest, Checksum, Incompatible
from worker_agent.blocks.engines.nixl_envelope import Envelope, Regions, decode, encode
from worker_agent.blocks.engines.nixl_messages import read_message, write_message

U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
REGIONS = st.builds(
    Regions,
    is_device=st.booleans(),
    ordinal=U32,
    allocations=st.lists(st.tuples(U64, U64), max_size=3).map(tuple),
)
ENVELOPES = st.builds(
    Envelope,
    incarnation=U64,
    agent=st.text(min_size=1, max_size=20),
    metadata=st.binary(min_size=1, max_size=400),
    hears=st.booleans(),
    layouts=st.lists(st.tuples(st.builds(LayoutHandle, owner_id=U64, number=U64), REGIONS), max_size=3).map(tuple),
)
SAMPLE = Envelope(
    incarnation=5,
    agent="ayni-5-1",
    metadata=b"nixl's own",
    hears=True,
    layouts=((LayoutHandle(owner_id=7, number=3), Regions(is_device=False, allocations=((4096, 100), (8192, 100)))),),
)


@given(ENVELOPES)
def test_round_trip(envelope):
    assert decode(encode(envelope), "a peer") == envelope


@given(envelope=ENVELOPES, place=st.integers(0, 2**16), bit=st.integers(0, 7))
def test_one_changed_bit_is_noticed(envelope, place, bit):
    data = bytearray(encode(envelope))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises((BadRequest, Checksum, Incompatible)):
        decode(bytes(data), "a peer")


@given(envelope=ENVELOPES, length=st.integers(0, 2**16))
def test_anything_shorter_or_longer_is_refused(envelope, length):
    data = encode(envelope)
    for wrong in (data[: length % len(data)], data + b"x"):
        with pytest.raises(AyniError):
            decode(wrong, "a peer")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(BadRequest, match="the nixl export of a peer can't be read"):
        decode(data, "a peer")


def _with_body(body: bytes) -> bytes:
    """Returns an envelope whose sums are right, whatever its body is."""
    head = encode(SAMPLE)[:20] + len(body).to_bytes(4, "little")
    return head + zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little") + body


@pytest.mark.parametrize("cut", range(0, len(encode(SAMPLE)) - 28, 3))
def test_parts_that_do_not_add_up_are_refused_although_the_sums_are_right(cut):
    body = encode(SAMPLE)[28:]
    with pytest.raises(BadRequest):
        decode(_with_body(body[:cut]), "a peer")
    with pytest.raises(BadRequest):
        decode(_with_body(body + b"12"), "a peer")


def test_other_version_and_huge_export_are_refused():
    data = bytearray(encode(SAMPLE))
    data[4] = 9
    with pytest.raises(Incompatible, match="exports version 9 for engine nixl; this worker knows 1"):
        decode(bytes(data), "a peer")
    with pytest.raises(BadRequest):
        decode(bytes(5 << 20), "a peer")
    data = bytearray(encode(SAMPLE))
    data[-1] ^= 1
    with pytest.raises(Checksum):
        decode(bytes(data), "a peer")


@given(number=U64, other=st.binary(max_size=20))
def test_messages_of_pushes(number, other):
    assert read_message(write_message(number)) == number
    assert read_message(other) is None or other == write_message(read_message(other) or 0)
