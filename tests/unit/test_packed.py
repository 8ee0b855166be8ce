"""Contributions that wait as they travel: the sums are those of the decoded ones, to the bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni import tensors
from ayni.errors import BadChunk, NonFinite
from ayni.reduce import packed
from ayni.reduce.places import MeanPlace
from ayni.reduce.reduction import Round
from ayni.tensors import TensorSpec

ROUNDED = [dtype for dtype in tensors.WIRE_DTYPES if dtype != "float32"]
SIZE, CHUNK = 1000, 256

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def bytes_of(values, dtype: str) -> np.ndarray:
    return np.frombuffer(bytes(tensors.encode(np.asarray(values, np.float32), dtype)), np.uint8)


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=600))
def test_what_is_put_into_memory_is_what_would_travel(dtype, values):
    array = np.asarray(values, np.float32)
    there = np.zeros(tensors.payload_bytes(array.size, dtype), np.uint8)
    tensors.encode_into(array, dtype, there)
    assert there.tobytes() == bytes_of(values, dtype).tobytes()
    assert tensors.count_elements(there.size, dtype) == array.size


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=600))
def test_values_that_are_not_finite_are_seen_without_decoding(dtype, values):
    data = bytes_of(values, dtype)
    assert tensors.is_finite(data, dtype) == bool(np.isfinite(tensors.decode(data, dtype)).all())


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
@given(data=st.binary(min_size=0, max_size=1100))
def test_the_same_holds_for_bytes_that_no_encoder_of_ours_writes(dtype, data):
    try:
        count = tensors.count_elements(len(data), dtype)
    except BadChunk:
        return
    array = np.frombuffer(data, np.uint8)
    decoded = tensors.decode(data, dtype)
    assert decoded.size == count
    assert tensors.is_finite(array, dtype) == bool(np.isfinite(decoded).all())


@pytest.mark.parametrize(("dtype", "num_bytes"), [("bfloat16", 3), ("float32", 6), ("int8", 4), ("int8", 264)])
def test_bytes_that_are_no_whole_elements_are_refused(dtype, num_bytes):
    with pytest.raises(BadChunk):
        packed.packed(np.zeros(num_bytes, np.uint8), dtype)


def reduced(dtype: str, is_packed: bool, place: MeanPlace | None = None) -> tuple[bytes, Round]:
    """The mean of three contributions, the first of which has two parts, and its round."""
    spec = TensorSpec(dtype=dtype, num_elements=SIZE)
    whole = Round(
        label="step 1, flat", spec=spec, num_microbatches=5, chunk_elements=CHUNK, expected=[1, 2, 3], place=place
    )
    whole.begin(1, "ant", spec, {0: 3, 1: 1, 2: 1})
    whole.begin(2, "bee", spec, {3: 2})
    whole.begin(3, "cat", spec, {4: 1})
    mean = np.full(SIZE, np.nan, np.float32)
    for lease, part in ((3, 0), (1, 1), (2, 0), (1, 0)):
        values = np.random.default_rng(10 * lease + part).normal(size=SIZE).astype(np.float32)
        for offset in range(0, SIZE, CHUNK):
            data = bytes_of(values[offset : offset + CHUNK], dtype)
            chunk = packed.packed(data, dtype) if is_packed else tensors.decode(data.data, dtype)
            for found in whole.contribute(lease, part, offset, chunk):
                mean[found.offset : found.offset + found.values_C.size] = found.values_C
    assert whole.complete
    assert whole.held_bytes == 0
    return mean.tobytes(), whole


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
def test_sums_do_not_depend_on_whether_the_bytes_were_decoded_before(dtype):
    (there, held), (decoded, plain) = reduced(dtype, True), reduced(dtype, False)
    assert there == decoded
    assert (held.digest, held.square_sum) == (plain.digest, plain.square_sum)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_what_waits_is_no_copy_and_is_not_written_to(dtype):
    spec = TensorSpec(dtype=dtype, num_elements=CHUNK)
    whole = Round(label="step 1, flat", spec=spec, num_microbatches=2, chunk_elements=CHUNK, expected=[1, 2])
    whole.begin(1, "ant", spec, {0: 1})
    whole.begin(2, "bee", spec, {1: 1})
    first, second = (bytes_of(np.full(CHUNK, value), dtype).copy() for value in (1, 2))
    whole.contribute(1, 0, 0, packed.packed(first, dtype))
    assert whole.held_bytes == first.nbytes
    before = first.tobytes(), second.tobytes()
    (mean,) = whole.contribute(2, 0, 0, packed.packed(second, dtype))
    assert np.allclose(mean.values_C, 1.5, rtol=0.01)
    assert (first.tobytes(), second.tobytes()) == before


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named(dtype, value):
    spec = TensorSpec(dtype=dtype, num_elements=CHUNK)
    whole = Round(label="step 1, flat", spec=spec, num_microbatches=1, chunk_elements=CHUNK, expected=[1])
    whole.begin(1, "ant", spec, {0: 1})
    values = np.ones(CHUNK, np.float32)
    values[200] = value
    with pytest.raises(NonFinite) as caught:
        whole.contribute(1, 0, 0, packed.packed(bytes_of(values, dtype), dtype))
    assert (caught.value.metadata["worker"], caught.value.metadata["element"]) == ("ant", "200")
    assert whole.held_bytes == 0
