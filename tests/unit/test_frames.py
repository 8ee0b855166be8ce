"""Hot frames against the generated classes, in both directions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni import frames
from ayni.errors import BadRequest
from ayni.v1 import coordinator_pb2, tensor_pb2

REQUESTS = (
    coordinator_pb2.GradientRequest,
    coordinator_pb2.BlockGradientRequest,
    coordinator_pb2.NonBlockGradientRequest,
)
RESPONSES = (
    coordinator_pb2.GradientResponse,
    coordinator_pb2.BlockGradientResponse,
    coordinator_pb2.NonBlockGradientResponse,
)

chunks = st.fixed_dictionaries(
    {
        "offset_bytes": st.integers(0, 2**64 - 1),
        "part": st.integers(0, 2**32 - 1),
        "data": st.binary(max_size=300) | st.sampled_from([b"x" * 20_000, b"x" * 70_001]),
    },
    optional={"crc32": st.integers(0, 2**32 - 1)},
)


def _as_tuple(view: object) -> tuple[int, int, int | None, bytes]:
    assert isinstance(view, frames.ChunkView)
    return view.offset_bytes, view.part, view.crc32, bytes(view.data)


def _expected(fields: dict) -> tuple[int, int, int | None, bytes]:
    return fields["offset_bytes"], fields["part"], fields.get("crc32"), fields["data"]


@given(fields=chunks, message=st.sampled_from(REQUESTS + RESPONSES))
def test_joined_frame_is_what_the_generated_class_writes(fields, message):
    frame = frames.encode_chunk(
        frames.CHUNK_FIELD, fields["offset_bytes"], fields["part"], fields["data"], fields.get("crc32")
    )
    parsed = message.FromString(frame)
    assert parsed.WhichOneof("frame") == "chunk"
    assert parsed == message(chunk=tensor_pb2.Chunk(**fields, padding=parsed.chunk.padding))
    assert not parsed.chunk.padding.strip(b"\0")
    assert not fields["data"] or (len(frame) - len(fields["data"])) % 8 == 0, "the payload is aligned"
    assert frame == parsed.SerializeToString(deterministic=True)


@given(fields=chunks, message=st.sampled_from(REQUESTS + RESPONSES))
def test_generated_frame_is_parsed_in_place(fields, message):
    frame = message(chunk=tensor_pb2.Chunk(**fields)).SerializeToString()
    number, view = frames.decode_frame(frame)
    assert number == frames.CHUNK_FIELD
    assert _as_tuple(view) == _expected(fields)
    if fields["data"]:
        assert isinstance(view, frames.ChunkView)
        assert view.data.obj is frame, "the payload is a view of the frame, not a copy"


@given(fields=chunks, order=st.permutations(range(5)), split=st.integers(0, 5), extra=st.binary(max_size=20))
def test_any_field_order_split_and_unknown_fields(fields, order, split, extra):
    pieces = [
        b"\x08" + frames.varint(fields["offset_bytes"]),
        b"\x10" + frames.varint(fields["part"]),
        b"\x1d" + fields["crc32"].to_bytes(4, "little") if "crc32" in fields else b"",
        b"\x22\x03pad",
        b"\x2a" + frames.varint(len(fields["data"])) + fields["data"],
    ]
    unknown = b"\xfa\x01" + frames.varint(len(extra)) + extra + b"\xf8\x01\x05" + b"\xf5\x01abcd" + b"\xf1\x01abcdefgh"
    shuffled = [pieces[i] for i in order]
    first, second = b"".join(shuffled[:split]) + unknown, b"".join(shuffled[split:])
    frame = b"".join(b"\x12" + frames.varint(len(part)) + part for part in (first, second)) + unknown
    assert coordinator_pb2.GradientRequest.FromString(frame).chunk.data == fields["data"]
    number, view = frames.decode_frame(frame)
    assert (number, _as_tuple(view)) == (frames.CHUNK_FIELD, _expected(fields))


@given(worker_id=st.integers(0, 2**32 - 1), block=st.integers(0, 2**32 - 1))
def test_begin_frame_is_handed_on_as_bytes(worker_id, block):
    begin = coordinator_pb2.BlockGradientBegin(round=coordinator_pb2.RoundBegin(worker_id=worker_id), block_index=block)
    number, content = frames.decode_frame(coordinator_pb2.BlockGradientRequest(begin=begin).SerializeToString())
    assert number == 1
    assert isinstance(content, memoryview)
    assert coordinator_pb2.BlockGradientBegin.FromString(bytes(content)) == begin


def test_empty_frame_sets_nothing():
    assert frames.decode_frame(b"")[0] == 0


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_refused(data):
    try:
        _, content = frames.decode_frame(data)
    except BadRequest:
        return
    parsed = coordinator_pb2.GradientRequest()
    if isinstance(content, frames.ChunkView):
        try:
            parsed.ParseFromString(data)
        except Exception:
            return
        assert bytes(parsed.chunk.data) == bytes(content.data)


@given(fields=chunks, cut=st.integers(1, 400))
def test_truncated_frame_is_refused(fields, cut):
    frame = frames.encode_chunk(2, fields["offset_bytes"], fields["part"], fields["data"], fields.get("crc32"))
    short = frame[: -(cut % len(frame)) or None]
    if 0 < len(short) < len(frame):
        with pytest.raises(BadRequest):
            frames.decode_frame(short)


@pytest.mark.parametrize("piece", [b"\x12\x00", b"\xf8\x01\x05", b"\x12\x02\x08\x01"])
def test_frame_of_countless_small_fields_is_refused_at_once(piece):
    with pytest.raises(BadRequest, match="more than 256 fields"):
        frames.decode_frame(piece * 500_000)
