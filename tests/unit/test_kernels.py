"""Compiled loops give numpy's bytes; where they don't, or can't be had, nobody notices but the log."""

import importlib.util
import itertools
import logging
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ayni import tensors
from ayni.kernels import loading
from ayni.kernels.current import kernels, use
from ayni.kernels.numpy_kernels import SCALE_BLOCK, SQUARES_SEGMENT, NumpyKernels
from ayni.kernels.probe import differing
from ayni.reduce import sums
from ayni.reduce.digest import MeanDigest
from ayni.reduce.mean_writer import MeanWriter
from ayni.reduce.packed import packed
from ayni.reduce.places import MeanPlace
from ayni.reduce.reduction import Round
from ayni.reduce.sums import BLOCK
from ayni.reduce.thread_digest import ThreadDigest
from ayni.settings import SettingsError
from ayni.tensors import TensorSpec

NUMPY = NumpyKernels()
COMPILED = loading.compiled()
BOTH = (NUMPY, COMPILED)

any_bits = st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=3 * SCALE_BLOCK)


@pytest.fixture(autouse=True)
def _as_before():
    before = use(NUMPY)
    yield
    use(before)


def numbers(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def test_the_probe_finds_nothing():
    assert differing(COMPILED, NUMPY) == []
    assert differing(NUMPY, NUMPY) == []


@pytest.mark.parametrize("name", ["mean", "squares", "to_bfloat16", "to_int8", "from_int8"])
def test_the_probe_names_a_loop_that_is_off_by_a_bit(name):
    class Off(NumpyKernels):
        pass

    def off(self, *arguments):
        getattr(NUMPY, name)(*arguments)
        arguments[-1].view(np.uint8)[-1] ^= 1

    def off_in_the_mean(self, left, right, weight, out, squares):
        NUMPY.mean(left, right, weight, out, squares)
        out.view(np.uint8)[-4] ^= 1

    setattr(Off, name, off_in_the_mean if name == "mean" else off)
    assert name in differing(Off(), NUMPY)


def test_the_probe_names_a_largest_number_that_is_off_by_a_bit():
    class Off(NumpyKernels):
        def largest(self, bits_C):
            return NUMPY.largest(bits_C) ^ 1

    assert differing(Off(), NUMPY) == ["largest"]


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@given(words=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=300), start=st.integers(0, 3))
def test_the_largest_number_is_found_wherever_the_bits_begin(loops, dtype, words, start):
    bits = np.array(words, np.uint32).astype(dtype)
    memory = np.empty(start + bits.nbytes, np.uint8)
    memory[start:] = bits.view(np.uint8)
    without_sign = bits & dtype((1 << (8 * bits.itemsize - 1)) - 1)
    assert loops.largest(memory[start:].view(dtype)) == without_sign.max()


@pytest.mark.parametrize("loops", BOTH)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@given(words=st.lists(st.integers(0, 0xFFFF), min_size=2, max_size=300).filter(lambda words: len(words) % 2 == 0))
def test_what_is_not_finite_is_seen_with_either(loops, dtype, words):
    use(loops)
    data = np.array(words, np.uint16).view(np.uint8)
    values = tensors.decode(data, dtype)
    assert tensors.is_finite(data, dtype) == bool(np.isfinite(values).all())
    assert sums.is_finite(values) == bool(np.isfinite(values).all())


@given(bits=any_bits)
def test_bfloat16_of_any_bits_is_the_same(bits):
    found = []
    for loops in BOTH:
        found.append(np.zeros(len(bits), np.uint16))
        loops.to_bfloat16(numbers(bits), found[-1])
    assert found[0].tobytes() == found[1].tobytes()


@given(bits=any_bits)
def test_int8_of_any_bits_is_the_same_as_a_payload(bits):
    payloads, back = [], []
    for loops in BOTH:
        use(loops)
        payloads.append(bytes(tensors.encode(numbers(bits), "int8")))
        back.append(tensors.decode(payloads[-1], "int8").tobytes())
    assert payloads[0] == payloads[1]
    assert back[0] == back[1]


@pytest.mark.parametrize("loops", BOTH, ids=lambda loops: loops.name.split()[0])
@given(bits=any_bits, start=st.integers(0, 2), length=st.integers(1, 3 * SCALE_BLOCK))
@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
def test_a_part_of_wire_bytes_is_decoded_as_the_whole_is(loops, dtype, bits, start, length):
    use(loops)
    data = np.frombuffer(bytes(tensors.encode(numbers(bits), dtype)), np.uint8)
    part = slice(start * SCALE_BLOCK, min(start * SCALE_BLOCK + length, len(bits)))
    if part.start < part.stop:
        whole = tensors.decode(data.data, dtype)
        assert tensors.decode_part(data, dtype, part).tobytes() == whole[part].tobytes()


@given(seed=st.integers(0, 1 << 32), weight=st.integers(1, (1 << 24) - 1), has_right=st.booleans())
@settings(max_examples=40)
def test_means_and_their_squares_are_the_same(seed, weight, has_right):
    rng = np.random.default_rng(seed)
    left, right = (
        (rng.standard_normal(SQUARES_SEGMENT) * 10.0 ** rng.integers(-44, 38, SQUARES_SEGMENT)).astype(np.float32)
        for _ in range(2)
    )
    found = []
    for loops in BOTH:
        out, squares = np.zeros(SQUARES_SEGMENT, np.float32), np.zeros(1)
        loops.mean(left, right if has_right else None, weight, out, squares)
        if not loops.sums_squares_beside:
            loops.squares(out, squares)
        found.append(out.tobytes() + squares.tobytes())
    assert found[0] == found[1]


def test_a_mean_may_go_where_a_sum_was_and_begin_inside_a_word():
    data = b"x" + np.random.default_rng(0).standard_normal(2 * SQUARES_SEGMENT).astype("<f4").tobytes()
    left, right = np.frombuffer(data, np.float32, offset=1).reshape(2, -1)
    assert not left.flags.aligned
    found = []
    for loops in BOTH:
        out, squares = np.zeros(SQUARES_SEGMENT, np.float32), np.zeros(1)
        loops.mean(left, right, 3, out, squares)
        loops.mean(out, right, 4, out, squares)
        loops.squares(left, squares)
        found.append(out.tobytes() + squares.tobytes())
    assert found[0] == found[1]


def reduced(dtype: str, size: int, chunk: int, changing: bool = False) -> tuple[bytes, str, float]:
    """The mean of three contributions, its hash and the sum of its squares."""
    spec = TensorSpec(dtype=dtype, num_elements=size)
    whole = Round(label="step 1, flat", spec=spec, num_microbatches=3, chunk_elements=chunk, expected=[1, 2, 3])
    for lease in (1, 2, 3):
        whole.begin(lease, f"worker-{lease}", spec, {lease - 1: lease})
    mean = np.full(size, np.nan, np.float32)
    for count, offset in enumerate(range(0, size, chunk)):
        for lease in (2, 3, 1):
            if changing:
                use(BOTH[(count + lease) % 2])
            values = np.random.default_rng(lease).standard_normal(size).astype(np.float32)[offset : offset + chunk]
            data = np.frombuffer(bytes(tensors.encode(values, dtype)), np.uint8)
            for found in whole.contribute(lease, 0, offset, packed(data, dtype)):
                mean[found.offset : found.offset + found.values_C.size] = found.values_C
    return mean.tobytes(), whole.digest, whole.square_sum


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
@pytest.mark.parametrize(("size", "chunk"), [(100_000, 65536), (100_000, 12 * 256), (9000, 9000), (70, 256)])
def test_a_reduction_is_the_same_with_either_and_with_both(dtype, size, chunk):
    use(NUMPY)
    expected = reduced(dtype, size, chunk)
    use(COMPILED)
    assert reduced(dtype, size, chunk) == expected
    assert reduced(dtype, size, chunk, changing=True) == expected


@pytest.mark.parametrize("loops", BOTH, ids=lambda loops: loops.name.split()[0])
def test_a_digest_looks_at_sums_of_squares_that_it_is_given(loops):
    use(loops)
    mean = np.ones(SQUARES_SEGMENT, np.float32)
    digest = MeanDigest()
    digest.add(mean, [np.inf])
    assert not digest.is_finite


@pytest.mark.parametrize("place", [MeanPlace(), MeanPlace(new_digest=ThreadDigest)], ids=["at once", "thread"])
def test_loops_that_change_within_a_mean_lose_no_squares(monkeypatch, place):
    size = 3 * BLOCK + 100
    left, right = (np.random.default_rng(seed).standard_normal(size).astype(np.float32) for seed in (1, 2))
    expected = MeanWriter("step 1, flat", place)
    expected.write(0, left.copy(), right.copy(), 3)
    turns = itertools.cycle(BOTH)
    monkeypatch.setattr(sums, "kernels", lambda: next(turns))
    mixed = MeanWriter("step 1, flat", place)
    mixed.write(0, left.copy(), right.copy(), 3)
    assert mixed.digest.hexdigest() == expected.digest.hexdigest()
    assert mixed.digest.square_sum() == expected.digest.square_sum()


def test_a_process_begins_with_numpy_and_goes_on_with_what_is_compiled(caplog):
    thread = loading.choose("auto")
    assert thread is not None
    thread.join(60)
    assert kernels().name.startswith("compiled by numba")
    assert loading.choose("numpy") is None
    assert kernels().name == "numpy"
    assert loading.choose("compiled") is None
    assert loading.choose("auto") is None, "what is compiled stays"
    assert kernels().name.startswith("compiled by numba")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv(loading.VARIABLE, "compiled")
    loading.choose()
    assert kernels().name.startswith("compiled by numba")
    monkeypatch.setenv(loading.VARIABLE, "fastest")
    with pytest.raises(SettingsError, match=r"AYNI_KERNELS is 'fastest'; it must be one of auto, compiled, numpy"):
        loading.choose()


def test_without_numba_numpy_goes_on(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert loading.choose("auto") is None
    assert kernels() is NUMPY


def test_a_numba_that_does_not_work_is_said_once(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "ayni.kernels.compiled", None)
    with pytest.raises(SettingsError, match="extra `fast`"):
        loading.choose("compiled")
    thread = loading.choose("auto")
    assert thread is not None
    thread.join(60)
    assert kernels() is NUMPY
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "sums and conversions stay numpy's" in caplog.text


def test_python_that_only_looks_compiled_is_not_used(monkeypatch):
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    with pytest.raises(SettingsError, match="NUMBA_DISABLE_JIT is set"):
        loading.choose("compiled")


def test_the_last_choice_counts_while_loops_are_compiled(monkeypatch):
    gate = threading.Event()
    made = loading.compiled

    def slowly():
        assert gate.wait(60)
        return made()

    monkeypatch.setattr(loading, "compiled", slowly)
    thread = loading.choose("auto")
    assert thread is not None
    loading.choose("numpy")
    gate.set()
    thread.join(60)
    assert kernels().name == "numpy"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("weight", [1, 3, 1 << 24])
@pytest.mark.parametrize("loops", BOTH, ids=lambda loops: loops.name.split()[0])
def test_a_signalling_nan_is_seen_without_a_warning(loops, weight):
    use(loops)
    left = numbers([0x7FA00000] * (SQUARES_SEGMENT + 5))
    out = np.zeros_like(left)
    assert sums.mean(left, None, weight, out).bad == 0


def test_loops_that_give_other_bytes_are_not_used(monkeypatch, caplog):
    monkeypatch.setattr(loading, "differing", lambda found, reference: ["mean"])
    with pytest.raises(SettingsError, match=r"loops mean, compiled by numba .*, give other bytes than numpy's"):
        loading.choose("compiled")
    thread = loading.choose("auto")
    assert thread is not None
    thread.join(60)
    assert kernels() is NUMPY
    assert "give other bytes" in caplog.text
