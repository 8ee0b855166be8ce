"""A gradient's bytes are copied once on each side of the wire, and nowhere else: allocations are counted."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from ayni import tensors
from ayni.frames import CHUNK_FIELD, ChunkView, decode_frame, encode_chunk
from worker_agent.chunks import MeanBuffer

SIZE = 1 << 18
PAYLOAD = 4 * SIZE
SMALL = 16 << 10
"""Allocations that are no copy of a payload."""


def allocated(work: Callable[[], Any]) -> tuple[int, Any]:
    """Most bytes that a piece of work held beyond what was there before, and its result."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = work()
        return tracemalloc.get_traced_memory()[1] - before, result
    finally:
        tracemalloc.stop()


def values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)


def framed() -> bytes:
    return encode_chunk(CHUNK_FIELD, 0, 0, tensors.encode(values(), "float32"))


def test_the_count_sees_a_copy():
    source = values()
    assert allocated(source.tobytes)[0] >= PAYLOAD
    assert allocated(source.copy)[0] >= PAYLOAD


def test_a_sender_copies_once_into_the_frame():
    source = values()
    peak, frame = allocated(lambda: encode_chunk(CHUNK_FIELD, 0, 0, tensors.encode(source, "float32")))
    assert PAYLOAD <= len(frame) < PAYLOAD + SMALL
    assert peak < PAYLOAD + SMALL


def test_a_receiver_reads_a_frame_in_place():
    frame = framed()
    peak, decoded = allocated(lambda: decode_frame(frame))
    content = decoded[1]
    assert isinstance(content, ChunkView)
    assert peak < SMALL
    assert np.shares_memory(np.frombuffer(content.data, np.uint8), np.frombuffer(frame, np.uint8))


def test_a_reducer_takes_numbers_out_of_the_frame_without_a_copy():
    frame = framed()
    content = decode_frame(frame)[1]
    assert isinstance(content, ChunkView)
    peak, numbers = allocated(lambda: tensors.decode(content.data, "float32"))
    assert peak < SMALL
    assert np.shares_memory(numbers, np.frombuffer(frame, np.uint8))
    assert numbers.ctypes.data % 4 == 0


def test_a_worker_copies_once_into_the_prepared_mean():
    frame, out = framed(), np.empty(SIZE, np.float32)
    mean = MeanBuffer("flat of step 0", "float32", out)
    content = decode_frame(frame)[1]
    assert isinstance(content, ChunkView)
    peak, _ = allocated(lambda: mean.add(content))
    assert peak < SMALL
    np.testing.assert_array_equal(out, values())
