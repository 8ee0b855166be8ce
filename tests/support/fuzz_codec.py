"""What must hold of the hand-written frames for any bytes: they are refused by name, or read as protobuf reads them.

Ours may take more than protobuf does (an over-long number, a damaged field that nobody asks for) and may refuse what no
encoder of ours writes (groups, hundreds of fields); what both take has to mean the same. Requests are responses without
the third kind of frame, so frames are compared with the responses.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

from ayni import frames
from ayni.errors import BadRequest, TooLarge
from ayni.v1 import coordinator_pb2, tensor_pb2
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks import frames as block_frames

GRADIENTS = (coordinator_pb2.GradientResponse, coordinator_pb2.BlockGradientResponse)
BLOCKS = (pb.ReadBlocksResponse,)


def check_gradient_frame(data: bytes) -> None:
    """Reads bytes as a frame of a gradient, by hand and by the generated classes."""
    try:
        number, content = frames.decode_frame(data)
    except BadRequest:
        return
    for message in GRADIENTS:
        parsed = _parsed(message, data)
        if parsed is None:
            continue
        assert number == _number(parsed), (number, _number(parsed), data)
        if isinstance(content, frames.ChunkView):
            _compare_chunk(content, parsed.chunk)
        elif number:
            _compare_bytes(content, parsed)


def check_block_frame(data: bytes) -> None:
    """Reads bytes as a frame of blocks, by hand and by the generated classes."""
    try:
        number, content = block_frames.decode_block_frame(data)
    except (BadRequest, TooLarge):
        return
    for message in BLOCKS:
        parsed = _parsed(message, data)
        if parsed is None:
            continue
        assert number == _number(parsed), (number, _number(parsed), data)
        if isinstance(content, block_frames.BlockChunk):
            _compare_block_chunk(content, parsed.chunk)
        elif number:
            _compare_bytes(content, parsed)


def check_gradient_round_trip(offset: int, part: int, crc32: int | None, payload: bytes) -> None:
    """Joins a frame and reads it again, by hand and by the generated classes."""
    frame = frames.encode_chunk(frames.CHUNK_FIELD, offset, part, payload, crc32)
    number, view = frames.decode_frame(frame)
    assert number == frames.CHUNK_FIELD
    assert isinstance(view, frames.ChunkView)
    assert (view.offset_bytes, view.part, view.crc32, bytes(view.data)) == (offset, part, crc32, payload)
    for message in GRADIENTS:
        _compare_chunk(view, message.FromString(frame).chunk)


def check_block_round_trip(head: block_frames.ChunkHead, payload: list[bytes], checksum: bool) -> None:
    """The same for a chunk of blocks."""
    frame = block_frames.encode_block_chunk(head, payload, checksum)
    number, chunk = block_frames.decode_block_frame(frame)
    assert number == block_frames.CHUNK
    assert isinstance(chunk, block_frames.BlockChunk)
    chunk.check_sum("a test")
    assert (list(chunk.blocks), bytes(chunk.data)) == (list(head.blocks), b"".join(payload))
    for message in BLOCKS:
        _compare_block_chunk(chunk, message.FromString(frame).chunk)


def corpus() -> list[bytes]:
    """Frames to begin with."""
    chunk = tensor_pb2.Chunk(offset_bytes=8, part=1, crc32=7, padding=b"1234", data=b"payload")
    blocks = pb.BlockChunk(stream_offset_bytes=300, index=1, blocks=[3, 200], layer_stop=2, crc32=1, data=b"payload")
    begin = coordinator_pb2.GradientBegin(round=coordinator_pb2.RoundBegin(worker_id=3, epoch=1))
    complete = pb.ReadComplete(sent_bytes=9, failures=[pb.BlockFailure(index=2)])
    found: tuple[Message, ...] = (
        coordinator_pb2.GradientRequest(chunk=chunk),
        coordinator_pb2.GradientRequest(begin=begin),
        pb.ReadBlocksResponse(chunk=blocks),
        pb.ReadBlocksResponse(complete=complete),
    )
    single = [message.SerializeToString() for message in found]
    return [*single, *(one + other for one in single for other in single)]


CHECKS: tuple[Callable[[bytes], None], ...] = (check_gradient_frame, check_block_frame)


def _parsed(message: Any, data: bytes) -> Any:
    try:
        return message.FromString(data)
    except DecodeError:
        return None


def _number(parsed: Any) -> int:
    name = parsed.WhichOneof("frame")
    return parsed.DESCRIPTOR.fields_by_name[name].number if name else 0


def _compare_chunk(view: frames.ChunkView, chunk: tensor_pb2.Chunk) -> None:
    crc32 = chunk.crc32 if chunk.HasField("crc32") else None
    ours = (view.offset_bytes, view.part, view.crc32, bytes(view.data))
    assert ours == (chunk.offset_bytes, chunk.part, crc32, chunk.data), (ours, chunk)


def _compare_block_chunk(ours: block_frames.BlockChunk, chunk: pb.BlockChunk) -> None:
    assert ours.crc32 == (chunk.crc32 if chunk.HasField("crc32") else None), (ours, chunk)
    assert (list(ours.blocks), bytes(ours.data)) == (list(chunk.blocks), chunk.data), (ours, chunk)
    for name in ("stream_offset_bytes", "index", "layer_start", "layer_stop", "offset_bytes"):
        assert getattr(ours, name) == getattr(chunk, name), (name, ours, chunk)


def _compare_bytes(content: memoryview, parsed: Any) -> None:
    inner = getattr(parsed, parsed.WhichOneof("frame"))
    assert type(inner).FromString(bytes(content)) == inner, (bytes(content), inner)
