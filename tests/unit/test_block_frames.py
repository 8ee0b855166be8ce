"""Frames of blocks against the generated classes, in both directions."""

import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.errors import BadRequest, Checksum, TooLarge
from ayni.frames import varint
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks import frames

MESSAGES = (pb.ReadBlocksResponse, pb.WriteBlocksRequest)
uint64 = st.integers(0, 2**64 - 1) | st.sampled_from([127, 128, 2**14 - 1, 2**14, 2**63, 2**64 - 1])
uint32 = st.integers(0, 2**32 - 1)
ids = st.lists(uint64, max_size=40)
payload = st.binary(max_size=300) | st.sampled_from([b"x" * 20_000, b"x" * 70_001])
chunks = st.fixed_dictionaries(
    {
        "stream_offset_bytes": uint64,
        "index": uint64,
        "blocks": ids,
        "layer_start": uint32,
        "layer_stop": uint32,
        "offset_bytes": uint64,
        "data": payload,
    },
    optional={"crc32": uint32},
)


def encode(fields: dict, pieces: list[bytes], checksum: bool) -> bytes:
    head = frames.ChunkHead(
        stream_offset_bytes=fields["stream_offset_bytes"],
        index=fields["index"],
        blocks=fields["blocks"],
        layers=(fields["layer_start"], fields["layer_stop"]),
        offset_bytes=fields["offset_bytes"],
    )
    return frames.encode_block_chunk(head, [memoryview(piece) for piece in pieces], checksum)


def chunk_of(frame: bytes) -> frames.BlockChunk:
    content = frames.decode_block_frame(frame)[1]
    assert isinstance(content, frames.BlockChunk)
    return content


def as_dict(content: object) -> dict:
    assert isinstance(content, frames.BlockChunk)
    result = {name: getattr(content, name) for name in content.__slots__}
    return result | {"data": bytes(content.data)}


@given(fields=chunks, cuts=st.lists(st.integers(0, 300), max_size=4), checksum=st.booleans())
def test_joined_frame_is_what_the_generated_class_writes(fields, cuts, checksum):
    bounds = [0, *sorted(cuts), len(fields["data"])]
    pieces = [fields["data"][start:stop] for start, stop in pairwise(bounds)]
    fields = fields | {"data": b"".join(pieces)}
    fields.pop("crc32", None)
    frame = encode(fields, pieces, checksum)
    if checksum:
        fields["crc32"] = zlib.crc32(fields["data"])
    for message in MESSAGES:
        assert frame == message(chunk=pb.BlockChunk(**fields)).SerializeToString(deterministic=True)


@given(fields=chunks, message=st.sampled_from(MESSAGES))
def test_generated_frame_is_parsed_in_place(fields, message):
    frame = message(chunk=pb.BlockChunk(**fields)).SerializeToString()
    content = chunk_of(frame)
    assert as_dict(content) == {"crc32": None} | fields
    assert not fields["data"] or content.data.obj is frame, "the payload is a view of the frame, not a copy"


@given(
    fields=chunks,
    order=st.permutations(range(8)),
    split=st.integers(0, 8),
    num_packed=st.integers(0, 40),
    extra=st.binary(max_size=20),
)
def test_any_field_order_split_packing_and_unknown_fields(fields, order, split, num_packed, extra):
    blocks = fields["blocks"]
    packed = b"".join(map(varint, blocks[:num_packed]))
    pieces = [
        b"\x08" + varint(fields["stream_offset_bytes"]),
        b"\x10\x07\x10" + varint(fields["index"]),
        b"\x1a" + varint(len(packed)) + packed + b"".join(b"\x18" + varint(block) for block in blocks[num_packed:]),
        b"\x20" + varint(fields["layer_start"]),
        b"\x28" + varint(fields["layer_stop"]),
        b"\x30" + varint(fields["offset_bytes"]),
        b"\x3d" + fields["crc32"].to_bytes(4, "little") if "crc32" in fields else b"",
        b"\x7a" + varint(len(fields["data"])) + fields["data"],
    ]
    unknown = b"\xfa\x01" + varint(len(extra)) + extra + b"\xf8\x01\x05" + b"\xf5\x01abcd" + b"\xf1\x01abcdefgh"
    shuffled = [pieces[i] for i in order]
    parts = (b"".join(shuffled[:split]) + unknown, b"".join(shuffled[split:]))
    frame = b"".join(b"\x12" + varint(len(part)) + part for part in parts) + unknown
    assert list(pb.ReadBlocksResponse.FromString(frame).chunk.blocks) == blocks
    kind, content = frames.decode_block_frame(frame)
    assert (kind, as_dict(content)) == (frames.CHUNK, {"crc32": None} | fields)


def test_numbers_too_large_for_their_field_are_cut_as_protobuf_does():
    frame = b"\x12\x0c\x20" + varint(2**63 + 5) + b"\x01"[:0]
    frame = frame[:1] + bytes([len(frame) - 2]) + frame[2:]
    assert pb.ReadBlocksResponse.FromString(frame).chunk.layer_start == 5
    assert as_dict(frames.decode_block_frame(frame)[1])["layer_start"] == 5


@given(block_bytes=uint64, total=uint64)
def test_begin_and_complete_are_handed_on_as_bytes(block_bytes, total):
    begin = pb.ReadBegin(block_bytes=block_bytes, total_bytes=total)
    kind, content = frames.decode_block_frame(pb.ReadBlocksResponse(begin=begin).SerializeToString())
    assert isinstance(content, memoryview)
    assert (kind, pb.ReadBegin.FromString(bytes(content))) == (frames.BEGIN, begin)
    complete = pb.ReadComplete(sent_bytes=total)
    kind, content = frames.decode_block_frame(pb.ReadBlocksResponse(complete=complete).SerializeToString())
    assert isinstance(content, memoryview)
    assert (kind, pb.ReadComplete.FromString(bytes(content))) == (frames.COMPLETE, complete)


def test_frame_without_a_known_kind_is_none():
    assert frames.decode_block_frame(b"")[0] == 0
    assert frames.decode_block_frame(b"\x62\x01x")[0] == 0


@given(st.lists(uint64, max_size=200))
def test_packed_numbers_are_those_of_protobuf(values):
    assert frames.packed(values) == b"".join(map(varint, values))
    assert frames.unpacked(memoryview(frames.packed(values))) == values


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(data):
    try:
        _, content = frames.decode_block_frame(data)
    except (BadRequest, TooLarge):
        return
    if isinstance(content, frames.BlockChunk):
        try:
            parsed = pb.ReadBlocksResponse.FromString(data)
        except Exception:
            return
        assert bytes(parsed.chunk.data) == bytes(content.data)


@given(fields=chunks, cut=st.integers(1, 400))
def test_truncated_frame_is_refused(fields, cut):
    frame = encode(fields, [fields["data"]], checksum=True)
    if short := frame[: -min(cut, len(frame) - 1)]:
        with pytest.raises(BadRequest):
            frames.decode_block_frame(short)


@pytest.mark.parametrize("data", [b"\x80", b"\x01\x80", b"\xff" * 10 + b"\x01"])
def test_broken_list_of_ids_is_refused(data):
    frame = b"\x12" + varint(len(data) + 2) + b"\x1a" + varint(len(data)) + data
    with pytest.raises(BadRequest, match="block id"):
        frames.decode_block_frame(frame)


def test_bounds_on_fields_and_ids(monkeypatch):
    monkeypatch.setattr(frames, "MAX_CHUNK_BLOCKS", 100)
    many = 101
    packed = b"\x1a" + varint(many) + bytes(many)
    with pytest.raises(TooLarge, match="more than 100 blocks"):
        frames.decode_block_frame(b"\x12" + varint(len(packed)) + packed)
    with pytest.raises(BadRequest, match="more than"):
        frames.decode_block_frame(b"\x12" + varint(800) + b"\x20\x00" * 400)


def test_damage_is_noticed_where_a_checksum_was_sent():
    fields = {"stream_offset_bytes": 8, "index": 1, "blocks": [3], "layer_start": 0, "layer_stop": 1, "offset_bytes": 0}
    frame = bytearray(encode(fields, [b"ab", b"cd"], checksum=True))
    chunk_of(bytes(frame)).check_sum("a peer")
    frame[-1] ^= 1
    with pytest.raises(Checksum, match="bytes 8 to 12 of the stream") as error:
        chunk_of(bytes(frame)).check_sum("a peer")
    assert error.value.metadata["expected"] == f"{zlib.crc32(b'abcd'):08x}"
    plain = bytearray(encode(fields, [b"abcd"], checksum=False))
    plain[-1] ^= 1
    chunk_of(bytes(plain)).check_sum("a peer")
