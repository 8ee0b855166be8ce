"""Measures what it costs to turn float32 numbers into what travels, and back: one thread, no network.

    python tests/bench/convert.py [--numel 25000000] [--chunk 262144] [--repeat 9] [--keep]

Each stage runs with compiled loops, and takes turns with a copy of the same float32 numbers, and where it was done in
another way before, or with the loops of numpy, with that one; the bytes must be equal. Times are processor time of the
thread, medians. Prints one JSON object to standard output; docs/benchmarks.md says how to read it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from ayni import tensors
from ayni.kernels import loading
from ayni.kernels.current import use
from ayni.kernels.numpy_kernels import NumpyKernels
from ayni.quantize import BLOCK_ELEMENTS
from ayni.reduce import packed, sums
from ayni.rpc import tune_allocator
from tests.bench import report

Stage = Callable[[], object]
"""Goes over the whole vector once."""
COPY = "copy of the float32 numbers"


def main() -> int:
    tune_allocator()
    loading.choose("compiled")
    given, measured_on = _arguments(), report.hardware()
    values_N = np.random.default_rng(0).standard_normal(given.numel, np.float32)
    stages = stages_of(values_N, given.chunk)
    samples = measure(stages, given.repeat, given.numel)
    rows = [
        report.row(case, median(samples[case]), peer, median(samples[peer]), "ns/element")
        for case, (_, peers) in stages.items()
        for peer in peers
    ]
    result = report.report("convert", rows, vars(given), samples, measured_on)
    if given.keep:
        print(f"kept in {report.keep(result)}", file=sys.stderr)
    print(json.dumps(result))
    return 0


def stages_of(values_N: np.ndarray, size: int) -> dict[str, tuple[Stage, list[str]]]:
    """Each stage by its name, and what it is compared with."""
    chunks = [values_N[at : at + size] for at in range(0, values_N.size, size)]
    int8 = [np.frombuffer(bytes(tensors.encode(chunk_C, "int8")), np.uint8) for chunk_C in chunks]
    bfloat16 = [np.frombuffer(bytes(tensors.encode(chunk_C, "bfloat16")), np.uint8) for chunk_C in chunks]
    for chunk_C, payload in zip(chunks, int8, strict=True):
        assert np.array_equal(payload, whole_chunk(chunk_C)), "both ways give the same bytes"
    before, decoded = "int8, quantise, whole chunks at once", "int8, decode, then look"
    numpy_int8, numpy_bfloat16 = "int8, quantise, numpy", "bfloat16, round, numpy"
    numpy_decoded = "int8, look, then decode, numpy"
    # A chunk begins anywhere in the frame that it comes in.
    loose = [np.frombuffer(b"." + chunk_C.tobytes(), np.float32, offset=1) for chunk_C in chunks]
    numpy_looked = "float32 in a frame, look, numpy"
    rounded, looked = "bfloat16, decode, then look", "bfloat16, look, then decode"
    return {
        COPY: (_each(chunks, np.copy), []),
        before: (_each(chunks, whole_chunk), [COPY]),
        numpy_int8: (_with_numpy(_each(chunks, lambda chunk_C: tensors.encode(chunk_C, "int8"))), [COPY]),
        "int8, quantise": (_each(chunks, lambda chunk_C: tensors.encode(chunk_C, "int8")), [COPY, before, numpy_int8]),
        decoded: (_each(int8, lambda data: sums.is_finite(tensors.decode(data, "int8"))), [COPY]),
        numpy_decoded: (_with_numpy(_each(int8, lambda data: _taken(data, "int8"))), [COPY]),
        "int8, look, then decode": (_each(int8, lambda data: _taken(data, "int8")), [COPY, decoded, numpy_decoded]),
        numpy_looked: (_with_numpy(_each(loose, sums.is_finite)), [COPY]),
        "float32 in a frame, look": (_each(loose, sums.is_finite), [COPY, numpy_looked]),
        numpy_bfloat16: (_with_numpy(_each(chunks, lambda chunk_C: tensors.encode(chunk_C, "bfloat16"))), [COPY]),
        "bfloat16, round": (
            _each(chunks, lambda chunk_C: tensors.encode(chunk_C, "bfloat16")),
            [COPY, numpy_bfloat16],
        ),
        rounded: (_each(bfloat16, lambda data: sums.is_finite(tensors.decode(data, "bfloat16"))), [COPY]),
        looked: (_each(bfloat16, lambda data: _taken(data, "bfloat16")), [COPY, rounded]),
    }


def _each(pieces: list[np.ndarray], work: Callable[[np.ndarray], object]) -> Stage:
    """Does the work on every piece; what comes of one has gone when the next one is taken, as in an exchange."""

    def stage() -> None:
        for piece in pieces:
            work(piece)

    return stage


def _with_numpy(stage: Stage) -> Stage:
    """The same with numpy's loops."""

    def with_numpy() -> None:
        before = use(NumpyKernels())
        stage()
        use(before)

    return with_numpy


def _taken(data: np.ndarray, dtype: str) -> tuple[bool, np.ndarray]:
    """What an owner of a slice does with a chunk that came."""
    values = packed.packed(data, dtype)
    return packed.is_finite(values), packed.floats(values)


def whole_chunk(values_C: np.ndarray) -> np.ndarray:
    """The payload of ordinary numbers in whole blocks, as it was made before: each operation over the whole chunk."""
    if values_C.size % BLOCK_ELEMENTS:
        return np.frombuffer(tensors.encode(values_C, "int8"), np.uint8)
    values_BK = values_C.reshape(-1, BLOCK_ELEMENTS)
    payload = np.empty(tensors.payload_bytes(values_C.size, "int8"), np.uint8)
    scales_B = payload[: 4 * len(values_BK)].view(np.float32)
    scratch_BK = np.abs(values_BK)
    largest_B = scratch_BK.view(np.int32).max(axis=1).view(np.float32)
    scales_B[...] = largest_B / np.float32(127)
    tops_B = scales_B * np.float32(127)
    is_odd_B = (scales_B < np.finfo(np.float32).smallest_normal) & (tops_B < largest_B)
    is_odd_B |= np.isinf(tops_B) & np.isfinite(largest_B)
    assert not is_odd_B.any(), "these are ordinary numbers"
    np.divide(values_BK, np.where(scales_B == 0, np.float32(1), scales_B)[:, np.newaxis], out=scratch_BK)
    payload[scales_B.nbytes :].view(np.int8).reshape(values_BK.shape)[...] = np.rint(scratch_BK, out=scratch_BK)
    assert np.isfinite(scales_B).all(), "these are ordinary numbers"
    return payload


def measure(stages: dict[str, tuple[Stage, list[str]]], repeat: int, numel: int) -> dict[str, list[float]]:
    """Nanoseconds for an element, of each stage; the stages take turns, after one to warm up."""
    samples: dict[str, list[float]] = {name: [] for name in stages}
    for repetition in range(-1, repeat):
        for name, (stage, _) in stages.items():
            start = time.thread_time()
            stage()
            if repetition >= 0:
                samples[name].append(round((time.thread_time() - start) / numel * 1e9, 4))
    return samples


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000, help="elements of the vector")
    parser.add_argument("--chunk", type=int, default=262_144, help="elements of a chunk, as many as are sent at once")
    parser.add_argument("--repeat", type=int, default=9, help="repetitions that count")
    parser.add_argument("--keep", action="store_true", help="also write the result to tests/bench/results")
    given = parser.parse_args()
    if min(given.numel, given.chunk, given.repeat) < 1 or given.chunk % BLOCK_ELEMENTS:
        parser.error(f"--numel, --chunk and --repeat must be 1 or more, --chunk a multiple of {BLOCK_ELEMENTS}")
    return given


if __name__ == "__main__":
    sys.exit(main())
