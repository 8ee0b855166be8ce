"""Whether two ways to run the loops give the same bytes, tried on numbers that have given away others.  [core]"""

from collections.abc import Iterator

import numpy as np

from ayni.kernels.current import Floats, Kernels
from ayni.kernels.numpy_kernels import SCALE_BLOCK, SQUARES_SEGMENT

_SIZE = 2 * SQUARES_SEGMENT
_WEIGHTS = (1, 3, 64, (1 << 24) - 1)


def differing(kernels: Kernels, reference: Kernels) -> list[str]:
    """Returns the names of loops that give other bytes than the reference's."""
    pairs = zip(_results(kernels, reference), _results(reference, reference), strict=True)
    return sorted({name for (name, found), (_, expected) in pairs if found != expected})


def _results(kernels: Kernels, reference: Kernels) -> Iterator[tuple[str, bytes]]:
    left_C, right_C = _numbers(1), _numbers(2)
    for weight in _WEIGHTS:
        for right in (right_C, None):
            yield "mean", _mean(kernels, reference, left_C, right, weight)
    squares_S = np.zeros(_SIZE // SQUARES_SEGMENT)
    kernels.squares(left_C, squares_S)
    yield "squares", squares_S.tobytes()
    for bits_C in (left_C.view(np.uint32), _any_bits().view(np.uint32), np.full(3, 1 << 31, np.uint32)):
        for found in (kernels.largest(bits_C), kernels.largest(bits_C.view(np.uint16)[1:])):
            yield "largest", str(found).encode()
    halves_C = np.zeros(_SIZE, np.uint16)
    kernels.to_bfloat16(_any_bits(), halves_C)
    yield "to_bfloat16", halves_C.tobytes()
    for size in (_SIZE, SCALE_BLOCK + 7, 5):
        scales_B, codes_C = np.zeros(-(-size // SCALE_BLOCK), np.float32), np.zeros(size, np.int8)
        kernels.to_int8(left_C[:size], scales_B, codes_C)
        yield "to_int8", scales_B.tobytes() + codes_C.tobytes()
        out_C = np.zeros(size, np.float32)
        kernels.from_int8(scales_B, codes_C, out_C)
        yield "from_int8", out_C.tobytes()


def _mean(kernels: Kernels, reference: Kernels, left_C: Floats, right_C: Floats | None, weight: int) -> bytes:
    out_C, squares_S = np.zeros(_SIZE, np.float32), np.zeros(_SIZE // SQUARES_SEGMENT)
    kernels.mean(left_C, right_C, weight, out_C, squares_S)
    if not kernels.sums_squares_beside:
        reference.squares(out_C, squares_S)
    return out_C.tobytes() + squares_S.tobytes()


def _numbers(seed: int) -> Floats:
    """Returns finite numbers of all sizes, with zeros, subnormal ones and the largest among them, shape [C]."""
    rng, limits = np.random.default_rng(seed), np.finfo(np.float32)
    exponents = np.repeat(rng.integers(-44, 38, _SIZE // SCALE_BLOCK), SCALE_BLOCK)
    numbers_C = (rng.standard_normal(_SIZE) * 10.0**exponents).astype(np.float32)
    numbers_C[:SCALE_BLOCK] = 0
    smallest = float(limits.smallest_subnormal)
    special = [0.0, -0.0, float(limits.tiny), -smallest, smallest]
    numbers_C[SCALE_BLOCK : SCALE_BLOCK + len(special)] = special
    # Halves of the largest, so that no sum of two is beyond float32.
    numbers_C[2 * SCALE_BLOCK :: 997] = limits.max / 2 * rng.choice([-1, 1], numbers_C[2 * SCALE_BLOCK :: 997].size)
    return numbers_C


def _any_bits() -> Floats:
    """Returns numbers of all kinds, NaN, infinities and ties among them, shape [C]."""
    bits_C = np.random.default_rng(3).integers(0, 1 << 32, _SIZE, dtype=np.uint32)
    bits_C[::5] = bits_C[::5] & np.uint32(0xFFFF0000) | np.uint32(0x8000)
    bits_C[:4] = 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF7FFFFF
    return bits_C.view(np.float32)
