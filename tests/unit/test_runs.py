"""Several chunks at once have the bytes of one chunk after another, and nothing gets lost between the two."""

import itertools

import numpy as np
import pytest

from ayni import tensors
from ayni.errors import BadChunk, NonFinite
from ayni.kernels.current import use
from ayni.kernels.loading import compiled
from ayni.kernels.numpy_kernels import NumpyKernels
from ayni.reduce.digest import SEGMENT
from ayni.reduce.reduction import Round
from ayni.shm.sources import Source
from ayni.tensors import TensorSpec
from ayni.tree import cover

CHUNK = 1024
SIZE = 2 * SEGMENT + 3 * CHUNK + 17
SHARES = {1: {0: 3, 1: 1}, 2: {2: 2}, 3: {3: 0}, 4: {4: 5, 5: 1, 6: 1}}
"""Weights of the micro-batches of each lease: several parts, one, and one without weight."""


@pytest.fixture(autouse=True, params=["numpy", "compiled"])
def _loops(request):
    before = use(compiled() if request.param == "compiled" else NumpyKernels())
    yield
    use(before)


def opened(size: int = SIZE) -> Round:
    spec = TensorSpec(dtype="float32", num_elements=size)
    found = Round(label="step 1, flat", spec=spec, num_microbatches=7, chunk_elements=CHUNK, expected=list(SHARES))
    for lease, weights in SHARES.items():
        found.begin(lease, f"worker-{lease}", spec, weights)
    return found


def values(lease: int, part: int) -> np.ndarray:
    array = np.random.default_rng(10 * lease + part).standard_normal(SIZE).astype(np.float32)
    array.flags.writeable = False
    return array


PARTS = [
    (lease, part)
    for lease, weights in SHARES.items()
    for part, node in enumerate(cover(min(weights), max(weights) + 1, 7))
    if any(weights[microbatch] for microbatch in range(node.start, node.stop))
]
"""What sends something, as (lease, part)."""


def by_chunks(round_: Round, mean: np.ndarray, start: int, stop: int) -> None:
    for offset in range(start, stop, CHUNK):
        for lease, part in reversed(PARTS):
            for found in round_.contribute(lease, part, offset, values(lease, part)[offset : offset + CHUNK]):
                mean[found.offset : found.offset + found.values_C.size] = found.values_C


def by_run(round_: Round, mean: np.ndarray, start: int, stop: int) -> None:
    assert round_.is_due(PARTS)
    found = round_.contribute_runs([(lease, part, values(lease, part)[start:stop]) for lease, part in PARTS])
    assert (found.offset, found.values_C.size) == (start, stop - start)
    mean[start:stop] = found.values_C


@pytest.mark.parametrize("turn", [0, 1])
def test_runs_and_chunks_may_take_turns(turn):
    expected, mixed = np.full(SIZE, np.nan, np.float32), np.full(SIZE, np.nan, np.float32)
    plain, other = opened(), opened()
    by_chunks(plain, expected, 0, SIZE)
    bounds = [0, 2 * CHUNK, 3 * CHUNK, 3 * CHUNK + SEGMENT, 2 * SEGMENT + 2 * CHUNK, SIZE]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        is_last = stop == SIZE
        (by_chunks if is_last or number % 2 == turn else by_run)(other, mixed, start, stop)
    assert other.complete
    assert other.held_bytes == 0
    assert mixed.tobytes() == expected.tobytes()
    assert (other.digest, other.square_sum) == (plain.digest, plain.square_sum)
    assert all(other.finished_sending(lease) for lease in SHARES)


def test_a_mean_is_copied_to_where_it_is_wanted():
    mean, copy = np.full(SIZE, np.nan, np.float32), np.full(SIZE, np.nan, np.float32)
    round_ = opened()
    round_.mean.copies.append(copy)
    by_run(round_, mean, 0, SEGMENT)
    by_chunks(round_, mean, SEGMENT, SIZE)
    assert copy.tobytes() == mean.tobytes()


def test_runs_are_due_only_where_nothing_else_is_missing():
    round_ = opened()
    assert round_.is_due(PARTS)
    assert not round_.is_due(PARTS[1:])
    assert not round_.is_due([*PARTS, (3, 0)])
    assert not round_.is_due([*PARTS, PARTS[0]]), "each once"
    round_.contribute(1, 0, 0, values(1, 0)[:CHUNK])
    assert not round_.is_due(PARTS), "one has come already"


def test_runs_are_not_due_before_everybody_has_begun_or_where_nothing_weighs_anything():
    spec = TensorSpec(dtype="float32", num_elements=SIZE)
    round_ = Round(label="step 1, flat", spec=spec, num_microbatches=2, chunk_elements=CHUNK, expected=[1, 2])
    round_.begin(1, "ant", spec, {0: 1})
    assert not round_.is_due([(1, 0)])
    empty = Round(label="step 1, flat", spec=spec, num_microbatches=1, chunk_elements=CHUNK, expected=[1])
    empty.begin(1, "ant", spec, {0: 0})
    assert not empty.is_due([])


def test_what_is_not_finite_in_a_run_is_found_where_it_is():
    round_ = opened()
    bad = values(2, 0).copy()
    bad[SEGMENT + 5] = np.inf
    runs = [(lease, part, (bad if lease == 2 else values(lease, part))[: SEGMENT + CHUNK]) for lease, part in PARTS]
    with pytest.raises(NonFinite, match=f"at element {SEGMENT + 5}"):
        round_.contribute_runs(runs)
    assert round_.emitted == 0


@pytest.mark.parametrize("dtype", tensors.WIRE_DTYPES)
def test_a_source_has_its_pieces_in_order_and_no_more(dtype):
    array = np.random.default_rng(0).standard_normal(5 * 256 + 40).astype(np.float32)
    chunks = [array[start : start + 512] for start in range(0, array.size, 512)]
    data = np.concatenate([np.frombuffer(bytes(tensors.encode(chunk, dtype)), np.uint8) for chunk in chunks])
    found = Source(region=None, generation=0, data=data, dtype=dtype)
    assert [piece.size for piece in found.pieces(512)] == [chunk.size for chunk in chunks]
    assert found.piece(len(chunks), 512) is None
    run = found.run(512, 512)
    assert (run is None) == (dtype != "float32")
    assert run is None or run.tobytes() == chunks[1].tobytes()
    assert found.run(512, array.size) is None, "there are not so many"


def test_bytes_that_are_no_whole_elements_are_refused():
    found = Source(region=None, generation=0, data=np.zeros(6, np.uint8), dtype="float32")
    with pytest.raises(BadChunk):
        found.piece(0, 512)
