"""One byte for each element and a scale for each block: what is off by how much, and what is refused.

Legend: C elements in a chunk, B blocks in it.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ayni import tensors
from ayni.errors import BadChunk, NonFinite
from ayni.quantize import BLOCK_ELEMENTS, dequantize, num_elements, payload_bytes, quantize
from ayni.reduce.reduction import Round
from ayni.tensors import TensorSpec

LARGEST = float(np.finfo(np.float32).max)
ROUND_OFF = 2.0**-16
"""Of half a scale: how far the float32 quotient of an element and its scale may be from a tie."""

briefly = settings(max_examples=30)


def chunks(max_elements: int = 600, **options: object) -> st.SearchStrategy[np.ndarray]:
    floats = st.floats(width=32, **({"allow_nan": False, "allow_infinity": False} | options))  # type: ignore[arg-type]
    return arrays.arrays(np.float32, st.integers(1, max_elements), elements=floats)


@st.composite
def wide_chunks(draw: st.DrawFn) -> np.ndarray:
    """Many elements that are all different, of any size."""
    count, exponent = draw(st.integers(1, 900)), draw(st.integers(-149, 125))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return np.ldexp(rng.standard_normal(count).clip(-4, 4), exponent).astype(np.float32)


def scales_of(payload: np.ndarray, count: int) -> np.ndarray:
    """The scale of each element, shape [C], float64."""
    num_blocks = -(-count // BLOCK_ELEMENTS)
    scales_B = np.frombuffer(payload.tobytes(), "<f4", num_blocks).astype(np.float64)
    return np.repeat(scales_B, BLOCK_ELEMENTS)[:count]


def ulp(values: np.ndarray) -> np.ndarray:
    """The distance to the next float32 toward zero, float64."""
    sizes = np.abs(values)
    return sizes.astype(np.float64) - np.nextafter(sizes, np.float32(0)) + 1e-45


def blocks_of(values_C: np.ndarray) -> list[np.ndarray]:
    return [values_C[start : start + BLOCK_ELEMENTS] for start in range(0, values_C.size, BLOCK_ELEMENTS)]


@briefly
@given(st.one_of(chunks(), wide_chunks()))
@example(np.full(3, LARGEST, np.float32))
@example(np.array([1e-45, -3e-45, 2.7e-43], np.float32))
@example(np.array([190 * 1.4e-45], np.float32))
def test_every_element_is_off_by_at_most_half_a_scale(values_C: np.ndarray) -> None:
    payload = quantize(values_C)
    error_C = np.abs(dequantize(payload, values_C.size).astype(np.float64) - values_C)
    # The product of code and scale is rounded to float32, too.
    allowed_C = scales_of(payload, values_C.size) * (1 + ROUND_OFF) / 2 + ulp(values_C)
    assert (error_C <= allowed_C).all()


@briefly
@given(st.one_of(chunks(), wide_chunks()))
@example(np.full(3, LARGEST, np.float32))
@example(np.full(300, -1e-45, np.float32))
def test_the_largest_element_is_exact_to_one_ulp_of_the_scale(values_C: np.ndarray) -> None:
    payload = quantize(values_C)
    received_C = dequantize(payload, values_C.size)
    scales_B = scales_of(payload, values_C.size)[::BLOCK_ELEMENTS].astype(np.float32)
    for values, received, scale in zip(blocks_of(values_C), blocks_of(received_C), scales_B, strict=True):
        largest = int(np.abs(values).argmax())
        error = abs(float(received[largest]) - float(values[largest]))
        assert error <= 127 * float(np.spacing(scale))
        if np.abs(values[largest]) > 127 * np.finfo(np.float32).smallest_normal:
            assert error <= 2 * ulp(values[largest])


@briefly
@given(chunks(elements := 300), st.sampled_from([0.0, -0.0]))
def test_a_block_of_zeros_stays_zeros_beside_others(values_C: np.ndarray, zero: float) -> None:
    whole = np.concatenate([np.full(BLOCK_ELEMENTS, zero, np.float32), values_C, np.zeros(elements, np.float32)])
    received = dequantize(quantize(whole), whole.size)
    assert received[:BLOCK_ELEMENTS].tobytes() == bytes(4 * BLOCK_ELEMENTS)
    assert not received[-(whole.size % BLOCK_ELEMENTS or BLOCK_ELEMENTS) :].any()


def test_what_a_payload_looks_like() -> None:
    values_C = np.concatenate([np.full(256, 2.0), [254.0, -127.0, 1.4, 0.0]]).astype(np.float32)
    payload = quantize(values_C)
    assert payload[:8].tobytes() == np.array([2 / 127, 2.0], "<f4").tobytes()
    assert payload[8:].view(np.int8).tolist() == [127] * 256 + [127, -64, 1, 0]
    assert dequantize(payload.tobytes(), 260).tolist()[256:] == [254.0, -128.0, 2.0, 0.0]


@briefly
@given(wide_chunks(), st.integers(1, 3))
def test_where_a_tensor_is_cut_into_chunks_makes_no_difference(values_C: np.ndarray, blocks_per_chunk: int) -> None:
    step = blocks_per_chunk * BLOCK_ELEMENTS
    cut = [values_C[start : start + step] for start in range(0, values_C.size, step)]
    together = np.concatenate([dequantize(quantize(chunk_C), chunk_C.size) for chunk_C in cut])
    assert together.tobytes() == dequantize(quantize(values_C), values_C.size).tobytes()


@briefly
@given(wide_chunks())
def test_equal_values_have_equal_bytes_and_opposite_ones_opposite_codes(values_C: np.ndarray) -> None:
    assert quantize(values_C).tobytes() == quantize(values_C.copy()).tobytes()
    assert (
        dequantize(quantize(-values_C), values_C.size).tolist()
        == (-dequantize(quantize(values_C), values_C.size)).tolist()
    )


@briefly
@given(
    values_C=wide_chunks(),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
    place=st.integers(0, 899),
)
def test_what_is_not_finite_is_never_hidden_and_spoils_its_own_block_only(
    values_C: np.ndarray, bad: float, place: int
) -> None:
    place %= values_C.size
    values_C[place] = bad
    received = dequantize(quantize(values_C), values_C.size)
    assert np.flatnonzero(~np.isfinite(received)).tolist() == [place]
    assert received[place : place + 1].tobytes() == np.array([bad], np.float32).tobytes()
    block = slice(place // BLOCK_ELEMENTS * BLOCK_ELEMENTS, (place // BLOCK_ELEMENTS + 1) * BLOCK_ELEMENTS)
    clean = values_C.copy()
    clean[block] = 0
    received[block] = 0
    assert received.tobytes() == dequantize(quantize(clean), clean.size).tobytes()


@pytest.mark.parametrize(("bad", "name"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_what_is_not_finite_is_refused_by_name_where_it_is_reduced(bad: float, name: str) -> None:
    values_C = np.ones(700, np.float32)
    values_C[600] = bad
    spec = TensorSpec(dtype="int8", num_elements=700)
    round_ = Round(label="step 0, flat", spec=spec, num_microbatches=1, chunk_elements=1024, expected=[0])
    round_.begin(0, "ant", spec, {0: 1})
    received = tensors.decode(tensors.encode(values_C, "int8"), "int8")
    with pytest.raises(NonFinite, match=f"worker ant contributes {name} at element 600"):
        round_.contribute(0, 0, 0, received)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, LARGEST])
def test_a_scale_that_makes_no_sense_does_not_pass_for_numbers(scale: float) -> None:
    payload = quantize(np.arange(1, 9, dtype=np.float32))
    payload[:4] = np.frombuffer(np.array(scale, "<f4").tobytes(), np.uint8)
    assert not np.isfinite(dequantize(payload, 8)).any()


@given(st.integers(0, 5000))
def test_lengths_and_elements_belong_together(count: int) -> None:
    assert payload_bytes(count) == quantize(np.zeros(count, np.float32)).size == count + 4 * -(-count // 256)
    assert num_elements(payload_bytes(count)) == count


@given(st.integers(0, 5000))
def test_a_length_that_no_payload_has_is_refused(num_bytes: int) -> None:
    if num_bytes in {payload_bytes(count) for count in range(num_bytes + 1)}:
        assert payload_bytes(num_elements(num_bytes)) == num_bytes
        return
    with pytest.raises(BadChunk, match=f"a chunk of {num_bytes} bytes does not hold whole blocks") as caught:
        tensors.decode(bytes(num_bytes), "int8")
    assert caught.value.metadata["field"] == "length"


@pytest.mark.parametrize("num_bytes", [0, 300, 304, 307, 309, 400])
def test_a_payload_of_another_length_is_refused_and_nothing_is_written(num_bytes: int) -> None:
    out = np.full(300, 7, np.float32)
    with pytest.raises(BadChunk, match=f"a chunk of {num_bytes} bytes does not hold 300 int8 elements"):
        tensors.decode_into(bytes(num_bytes), "int8", out)
    with pytest.raises(BadChunk, match="does not hold 300 int8 elements and their scales"):
        dequantize(bytes(num_bytes), 300, out)
    assert (out == 7).all()


def test_numbers_arrive_from_bytes_that_are_not_aligned() -> None:
    values_C = np.linspace(-3, 5, 777, dtype=np.float32)
    payload = bytes(tensors.encode(values_C, "int8"))
    shifted = memoryview(b"x" + payload)[1:]
    out = np.empty(777, np.float32)
    tensors.decode_into(shifted, "int8", out)
    assert out.tobytes() == tensors.decode(payload, "int8").tobytes() == tensors.decode(shifted, "int8").tobytes()


def test_what_is_decoded_may_be_added_to_in_place() -> None:
    assert tensors.decode(bytes(tensors.encode(np.ones(3, np.float32), "int8")), "int8").flags.writeable


def test_int8_is_counted_in_the_elements_of_float32() -> None:
    assert tensors.position_bytes("int8") == 4
    assert [tensors.position_bytes(dtype) for dtype in tensors.MEAN_DTYPES] == [4, 2, 2]
    assert tensors.payload_bytes(257, "int8") == 257 + 8
    assert tensors.payload_bytes(257, "bfloat16") == 514
    assert TensorSpec(dtype="int8", num_elements=10).num_bytes == 40


def test_means_of_int8_travel_in_bfloat16_and_others_in_their_own_type() -> None:
    assert [tensors.mean_dtype(dtype) for dtype in tensors.WIRE_DTYPES] == [*tensors.MEAN_DTYPES, "bfloat16"]
