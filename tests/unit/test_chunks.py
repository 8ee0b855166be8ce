"""What leaves in which order, and what the chunks of a mean must be."""

import itertools
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni import tensors
from ayni.errors import BadChunk, BadRequest, Checksum
from ayni.frames import ChunkView
from coordinator_service.config import RunFile
from worker_agent.chunks import MeanBuffer, Slice, slices


def chunk(offset: int, data: bytes, part: int = 0, crc32: int | None = None) -> ChunkView:
    return ChunkView(offset, part, crc32, memoryview(data))


def test_chunks_leave_position_by_position_and_part_by_part():
    assert list(slices(5, "float32", 8, [0, 2])) == [
        Slice(0, 0, 0, 2),
        Slice(2, 0, 0, 2),
        Slice(0, 8, 2, 4),
        Slice(2, 8, 2, 4),
        Slice(0, 16, 4, 5),
        Slice(2, 16, 4, 5),
    ]


def test_without_parts_of_weight_nothing_leaves():
    assert list(slices(5, "float32", 8, [])) == []


def test_chunks_of_int8_are_cut_as_those_of_float32_and_hold_whole_blocks_of_one_scale():
    assert list(slices(600, "int8", 1024, [1])) == [
        Slice(1, 0, 0, 256),
        Slice(1, 1024, 256, 512),
        Slice(1, 2048, 512, 600),
    ]


@pytest.mark.parametrize("chunk_bytes", [0, 256, 1020, 1536])
def test_chunks_that_cut_blocks_of_one_scale_are_refused(chunk_bytes):
    with pytest.raises(BadRequest, match=f"chunks of {chunk_bytes} bytes, .* whole blocks of 256 int8 elements"):
        list(slices(600, "int8", chunk_bytes, [0]))


def test_every_chunk_length_of_a_run_file_holds_whole_blocks_of_one_scale():
    block_bytes = tensors.position_bytes("int8") * tensors.scale_block_elements("int8")
    taken = []
    for chunk_bytes in (*range(0, 1 << 18, 512), (1 << 20) + 4, 2 << 20):
        try:
            taken.append(RunFile(wire_type="int8", chunk_bytes=chunk_bytes).chunk_bytes)
        except ValueError:
            continue
    assert len(taken) == 4
    assert not any(chunk_bytes % block_bytes for chunk_bytes in taken)


@pytest.mark.parametrize("chunk_bytes", [0, 2, 6])
def test_chunks_that_cut_elements_are_refused(chunk_bytes):
    with pytest.raises(BadRequest, match=f"chunks of {chunk_bytes} bytes"):
        list(slices(5, "float32", chunk_bytes, [0]))


@given(
    num_elements=st.integers(1, 600),
    dtype=st.sampled_from(tensors.WIRE_DTYPES),
    elements_per_chunk=st.integers(1, 70),
    parts=st.sets(st.integers(0, 5)),
)
def test_slices_cover_every_part_once_without_a_gap(num_elements, dtype, elements_per_chunk, parts):
    size = tensors.position_bytes(dtype)
    elements_per_chunk *= tensors.scale_block_elements(dtype) or 1
    positions = dict.fromkeys(sorted(parts), 0)
    last_start = 0
    for piece in slices(num_elements, dtype, elements_per_chunk * size, sorted(parts)):
        assert piece.start == positions[piece.part] >= last_start
        assert piece.offset_bytes == piece.start * size
        assert piece.stop - piece.start == min(elements_per_chunk, num_elements - piece.start)
        positions[piece.part], last_start = piece.stop, piece.start
    assert set(positions.values()) <= {num_elements}


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50), cuts=st.sets(st.integers(1, 49)))
def test_a_mean_arrives_whole_however_it_is_cut(values, cuts):
    sent = np.array(values, np.float32)
    out = np.full_like(sent, np.nan)
    mean = MeanBuffer("flat", "float32", out)
    edges = [0, *sorted(cut for cut in cuts if cut < sent.size), sent.size]
    for start, stop in itertools.pairwise(edges):
        assert mean.received_bytes == start * 4
        mean.add(chunk(start * 4, sent[start:stop].tobytes()))
    mean.finish(total_weight=3)
    assert out.tobytes() == sent.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_mean_in_bfloat16_becomes_float32(dtype):
    out = np.zeros(2, np.float32)
    mean = MeanBuffer("flat", dtype, out)
    mean.add(chunk(0, bytes(tensors.encode(np.array([1.5, -2.0], np.float32), "bfloat16"))))
    mean.finish(total_weight=1)
    assert out.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (chunk(4, bytes(4)), "wrong offset: expected 0, received 4"),
        (chunk(0, bytes(4), part=1), "wrong offset: expected 0, received 0 of part 1"),
        (chunk(0, bytes(12)), "wrong length: expected at most 8, received 12"),
        (chunk(0, bytes(6)), "wrong length: expected a multiple of 4, received 6"),
    ],
)
def test_a_chunk_out_of_place_is_refused_and_nothing_is_written(bad, words):
    out = np.full(2, 7, np.float32)
    with pytest.raises(BadChunk, match=words) as caught:
        MeanBuffer("block 3", "float32", out).add(bad)
    assert caught.value.metadata["bucket"] == "block 3"
    assert out.tolist() == [7, 7]


def test_a_damaged_chunk_is_refused_and_an_intact_one_is_not():
    mean = MeanBuffer("flat", "float32", np.zeros(2, np.float32))
    data = np.ones(1, np.float32).tobytes()
    mean.add(chunk(0, data, crc32=zlib.crc32(data)))
    with pytest.raises(Checksum, match="mean of flat was damaged"):
        mean.add(chunk(4, data, crc32=zlib.crc32(data) ^ 1))


def test_the_end_is_counted():
    mean = MeanBuffer("flat", "float32", np.zeros(2, np.float32))
    mean.add(chunk(0, bytes(4)))
    with pytest.raises(BadChunk, match="wrong length: expected 8 in all, received 4"):
        mean.finish(total_weight=1)


def test_a_mean_without_weight_is_zeros_and_has_no_bytes():
    out = np.full(2, 7, np.float32)
    MeanBuffer("flat", "float32", out).finish(total_weight=0)
    assert out.tolist() == [0, 0]


def test_bytes_that_stop_in_the_middle_are_missing_even_without_weight():
    mean = MeanBuffer("flat", "float32", np.zeros(2, np.float32))
    mean.add(chunk(0, bytes(4)))
    with pytest.raises(BadChunk):
        mean.finish(total_weight=0)
