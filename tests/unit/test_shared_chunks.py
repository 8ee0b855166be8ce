"""Frames that say where bytes lie, against the generated classes; means put together in a given place."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni import frames, tensors
from ayni.errors import BadChunk
from ayni.frames import ChunkView, SharedRange
from ayni.reduce.digest import MeanDigest
from ayni.reduce.packed import floats
from ayni.reduce.places import MeanPlace
from ayni.reduce.reduction import Round
from ayni.reduce.thread_digest import ThreadDigest
from ayni.shm.sources import source
from ayni.tensors import TensorSpec
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2

words = st.integers(0, 2**64 - 1)
ranges = st.builds(SharedRange, words, words, words, words)


def message_of(place: SharedRange) -> tensor_pb2.SharedRange:
    return tensor_pb2.SharedRange(
        region=place.region,
        offset_bytes=place.offset_bytes,
        length_bytes=place.length_bytes,
        generation=place.generation,
    )


@given(place=ranges, offset=words, part=st.integers(0, 2**32 - 1))
def test_joined_frame_is_what_the_generated_class_writes(place, offset, part):
    frame = frames.encode_shared_chunk(frames.CHUNK_FIELD, offset, part, place)
    chunk = tensor_pb2.Chunk(offset_bytes=offset, part=part, shared=message_of(place))
    assert pb.GradientRequest.FromString(frame) == pb.GradientRequest(chunk=chunk)
    assert frames.decode_frame(frame) == (frames.CHUNK_FIELD, ChunkView(offset, part, None, memoryview(b""), place))


@given(place=ranges)
def test_a_range_may_come_in_pieces_and_with_fields_nobody_knows(place):
    half = tensor_pb2.SharedRange(region=place.region, length_bytes=7)
    rest = message_of(place)
    pieces = b"".join(
        b"\x32" + frames.varint(len(piece)) + piece
        for piece in (half.SerializeToString(), b"\x7d\x01\x02\x03\x04", rest.SerializeToString(), b"\x48\x05")
    )
    frame = b"\x12" + frames.varint(len(pieces)) + pieces
    merged = pb.GradientRequest.FromString(frame).chunk.shared
    _, view = frames.decode_frame(frame)
    assert isinstance(view, ChunkView)
    assert view.shared is not None
    assert (
        message_of(view.shared).SerializeToString()
        == tensor_pb2.SharedRange(
            region=merged.region,
            offset_bytes=merged.offset_bytes,
            length_bytes=merged.length_bytes,
            generation=merged.generation,
        ).SerializeToString()
    )


class FakeRegion:
    """What a mapped region looks like from here."""

    def __init__(self, size: int) -> None:
        self.id, self.size, self.generation = 9, size, 3
        self.bytes = np.zeros(size, np.uint8)


def region_of(size: int) -> Any:
    return FakeRegion(size)


@pytest.mark.parametrize(
    ("place", "data", "field"),
    [
        (SharedRange(9, 0, 20, 3), b"", "shared.length_bytes"),
        (SharedRange(9, 16, 4, 3), b"", "shared.length_bytes"),
        (SharedRange(9, 0, 0, 3), b"", "shared.length_bytes"),
        (SharedRange(9, 2**63, 2**63, 3), b"", "shared.length_bytes"),
        (SharedRange(9, 2, 4, 3), b"", "shared.offset_bytes"),
        (SharedRange(9, 0, 6, 3), b"", "shared.offset_bytes"),
        (SharedRange(9, 0, 8, 3), b"abcd", "data"),
    ],
)
def test_a_range_outside_its_region_is_refused_before_it_is_read(place, data, field):
    chunk = ChunkView(0, 0, None, memoryview(data), place)
    with pytest.raises(BadChunk) as caught:
        source("step 1, flat", region_of(16), chunk, place, "float32")
    assert caught.value.metadata["field"] == field


def test_a_region_that_was_not_lent_is_refused():
    place = SharedRange(9, 0, 8, 3)
    with pytest.raises(BadChunk, match="lent"):
        source("step 1, flat", None, ChunkView(0, 0, None, memoryview(b""), place), place, "int8")


def test_a_source_is_torn_once_its_owner_counts_on():
    region = region_of(16)
    place = SharedRange(9, 4, 8, 3)
    found = source("step 1, flat", region, ChunkView(0, 0, None, memoryview(b""), place), place, "float32")
    assert found.is_intact
    assert [piece.size for piece in found.pieces(1)] == [1, 1]
    region.generation += 1
    assert not found.is_intact


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
def test_a_range_is_cut_as_its_bytes_would_travel(dtype):
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    chunks = [bytes(tensors.encode(values[at : at + 256], dtype)) for at in range(0, 1000, 256)]
    region = region_of(64 + len(b"".join(chunks)))
    region.bytes[64:] = np.frombuffer(b"".join(chunks), np.uint8)
    place = SharedRange(9, 64, region.size - 64, 3)
    found = source("step 1, flat", region, ChunkView(0, 0, None, memoryview(b""), place), place, dtype)
    pieces = list(found.pieces(256))
    assert [piece.size for piece in pieces] == [256, 256, 256, 232]
    assert [floats(piece).tobytes() for piece in pieces] == [tensors.decode(c, dtype).tobytes() for c in chunks]


def test_scales_without_codes_are_refused():
    region, place = region_of(300), SharedRange(9, 0, 264, 3)
    found = source("step 1, flat", region, ChunkView(0, 0, None, memoryview(b""), place), place, "int8")
    with pytest.raises(BadChunk, match="scale"):
        list(found.pieces(256))


def reduced(place: MeanPlace | None, weight: int) -> tuple[np.ndarray, Round]:
    """The mean of two read-only contributions of 1,000 elements in chunks of 256, and its round."""
    spec = TensorSpec(dtype="float32", num_elements=1000)
    whole = Round(label="step 1, flat", spec=spec, num_microbatches=2, chunk_elements=256, expected=[1, 2], place=place)
    whole.begin(1, "ant", spec, {0: weight})
    whole.begin(2, "bee", spec, {1: 1})
    mean = np.zeros(1000, np.float32)
    for lease in (2, 1):
        values = np.random.default_rng(lease).normal(size=1000).astype(np.float32)
        values.flags.writeable = False
        for offset in range(0, 1000, 256):
            for chunk in whole.contribute(lease, 0, offset, values[offset : offset + 256]):
                mean[chunk.offset : chunk.offset + chunk.values_C.size] = chunk.values_C
    assert whole.complete
    return mean, whole


@pytest.mark.parametrize("weight", [2, 1 << 25])
def test_a_mean_has_the_same_bytes_wherever_it_is_put_together_and_digested(weight):
    place = MeanPlace(new_digest=ThreadDigest, mean_N=np.full(1000, np.nan, np.float32))
    anywhere, plain = reduced(None, weight)
    there, placed = reduced(place, weight)
    assert place.mean_N is not None
    assert place.mean_N.tobytes() == there.tobytes() == anywhere.tobytes()
    assert (placed.digest, placed.square_sum) == (plain.digest, plain.square_sum)


def test_a_thread_takes_chunks_in_order_and_is_waited_for():
    gate = threading.Event()

    class Slow(MeanDigest):
        def add(self, mean_C, square_sums=()):
            gate.wait(10)
            super().add(mean_C, square_sums)

    class SlowThread(ThreadDigest, Slow):
        pass

    chunks = [np.full(64, value, np.float32) for value in range(8)]
    slow, plain = SlowThread(), MeanDigest()
    for chunk in chunks:
        slow.add(chunk)
        plain.add(chunk)
    threading.Timer(0.05, gate.set).start()
    assert (slow.hexdigest(), slow.square_sum()) == (plain.hexdigest(), plain.square_sum())
