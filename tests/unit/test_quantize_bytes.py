"""int8 payloads, to the byte, against the formula written out plainly: one block at a time, nothing in place.

Legend: C elements in a chunk, B blocks in it, K elements in a block.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ayni import tensors
from ayni.quantize import BLOCK_ELEMENTS, dequantize, quantize

PIECE = 65536
"""Elements that are worked on at a time: what lies across its end must not show."""
LARGEST = np.finfo(np.float32).max
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    3e-43,
    1.1754944e-38,
    1e-36,
    1.0,
    -254.0,
    LARGEST,
    -LARGEST,
    np.inf,
    -np.inf,
    np.nan,
]

briefly = settings(max_examples=40)


def plain_block(values_K: np.ndarray) -> tuple[np.float32, np.ndarray]:
    """The scale and the codes of one block."""
    if not np.isfinite(values_K).all():
        codes_K = np.select([np.isnan(values_K), values_K == np.inf, values_K == -np.inf], [-128, 1, -1], 0)
        return np.float32(np.inf), codes_K.astype(np.int8)
    largest = np.abs(values_K).max()
    scale = largest / np.float32(127)
    with np.errstate(over="ignore"):
        if scale < np.finfo(np.float32).smallest_normal and scale * np.float32(127) < largest:
            scale = np.nextafter(scale, np.float32(1))
        if np.isinf(scale * np.float32(127)):
            scale = np.nextafter(scale, np.float32(0))
    return scale, np.rint(values_K / (scale or np.float32(1))).astype(np.int8)


def plain_payload(values_C: np.ndarray) -> bytes:
    blocks = [plain_block(values_C[at : at + BLOCK_ELEMENTS]) for at in range(0, values_C.size, BLOCK_ELEMENTS)]
    scales = np.array([scale for scale, _ in blocks], "<f4")
    return scales.tobytes() + b"".join(codes.tobytes() for _, codes in blocks)


def plain_values(payload: bytes, count: int) -> np.ndarray:
    num_blocks = -(-count // BLOCK_ELEMENTS)
    scales_B = np.frombuffer(payload, "<f4", num_blocks)
    codes_C = np.frombuffer(payload, np.int8, count, 4 * num_blocks)
    values = []
    for scale, at in zip(scales_B, range(0, count, BLOCK_ELEMENTS), strict=True):
        codes_K = codes_C[at : at + BLOCK_ELEMENTS]
        with np.errstate(invalid="ignore", over="ignore"):
            values_K = codes_K.astype(np.float32) * scale
        if not np.isfinite(scale):
            values_K = np.select([codes_K == -128, codes_K == 0], [np.float32(np.nan), np.float32(0)], values_K)
        values.append(values_K.astype(np.float32))
    return np.concatenate(values)


@st.composite
def any_chunks(draw: st.DrawFn) -> np.ndarray:
    """Blocks of any size of numbers side by side, and special values among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.one_of(st.integers(1, 2000), st.integers(PIECE - 300, PIECE + 300)))
    exponents = draw(st.lists(st.integers(-149, 125), min_size=1, max_size=6))
    wide = np.ldexp(rng.standard_normal(count).clip(-4, 4), np.resize(np.repeat(exponents, BLOCK_ELEMENTS), count))
    values_C = wide.astype(np.float32)
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=6)):
        values_C[rng.integers(count)] = value
    return values_C


@briefly
@given(any_chunks())
@example(np.zeros(300, np.float32))
@example(np.full(600, LARGEST, np.float32))
@example(np.array(SPECIAL, np.float32))
@example(np.resize(np.array(SPECIAL[:-3], np.float32), 1000))
def test_the_bytes_are_those_of_the_formula(values_C: np.ndarray) -> None:
    payload = quantize(values_C).tobytes()
    assert payload == plain_payload(values_C)
    assert dequantize(payload, values_C.size).tobytes() == plain_values(payload, values_C.size).tobytes()


@briefly
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=700))
def test_any_bits_whatever_give_the_bytes_of_the_formula(bits: list[int]) -> None:
    values_C = np.array(bits, np.uint32).view(np.float32)
    assert quantize(values_C).tobytes() == plain_payload(values_C)


@briefly
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 900),
    scales=st.lists(st.floats(width=32), min_size=1, max_size=4),
)
def test_payloads_that_nobody_quantised_are_read_as_the_formula_says(
    seed: int, count: int, scales: list[float]
) -> None:
    num_blocks = -(-count // BLOCK_ELEMENTS)
    codes = np.random.default_rng(seed).integers(-128, 128, count).astype(np.int8)
    payload = np.resize(np.array(scales, "<f4"), num_blocks).tobytes() + codes.tobytes()
    read, plain = dequantize(payload, count), plain_values(payload, count)
    # Which NaN a product with one is, nobody promises.
    assert np.where(np.isnan(read), 0, read).tobytes() == np.where(np.isnan(plain), 0, plain).tobytes()
    assert (np.isnan(read) == np.isnan(plain)).all()


@pytest.mark.parametrize("count", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 257])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf])
def test_where_pieces_end_does_not_show(count: int, bad: float | None) -> None:
    values_C = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    if bad is not None:
        values_C[[0, count // 2, count - 1]] = bad
    payload = quantize(values_C).tobytes()
    assert payload == plain_payload(values_C)
    assert dequantize(payload, count).tobytes() == plain_values(payload, count).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_two_byte_number_is_seen_as_finite_or_not(dtype: str) -> None:
    for bits in np.arange(1 << 16, dtype="<u2").reshape(-1, 1):
        data = bits.view(np.uint8)
        assert tensors.is_finite(data, dtype) == bool(np.isfinite(tensors.decode(data, dtype)).all())
