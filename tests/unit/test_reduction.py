"""The reducer: bytes of the mean depend on the micro-batches alone."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ayni.errors import BadChunk, Duplicate, NonFinite, SpecMismatch
from ayni.reduce.reduction import Round
from ayni.tensors import TensorSpec
from ayni.tree import Node, children, cover, root


def tree_sum(node: Node, gradients: list[np.ndarray], weights: list[int]) -> np.ndarray | None:
    """The definition: left plus right, absent where there is no weight."""
    halves = children(node)
    if halves is None:
        return gradients[node.start] if weights[node.start] else None
    left, right = (tree_sum(half, gradients, weights) for half in halves)
    return left if right is None else right if left is None else left + right


@dataclass
class Case:
    gradients: list[np.ndarray]
    weights: list[int]
    cuts: list[int]
    chunk: int

    @property
    def num_microbatches(self) -> int:
        return len(self.weights)

    @property
    def size(self) -> int:
        return self.gradients[0].size

    def expected(self) -> np.ndarray | None:
        total = tree_sum(root(self.num_microbatches), self.gradients, self.weights)
        return None if total is None else total / np.float32(sum(self.weights))

    def open(self) -> Round:
        return Round(
            label="step 0, flat",
            spec=TensorSpec(dtype="float32", num_elements=self.size),
            num_microbatches=self.num_microbatches,
            chunk_elements=self.chunk,
            expected=range(len(self.cuts) - 1),
        )

    def frames(self, worker: int) -> list[tuple]:
        start, stop = self.cuts[worker], self.cuts[worker + 1]
        parts = [tree_sum(node, self.gradients, self.weights) for node in cover(start, stop, self.num_microbatches)]
        begin = [("begin", {m: self.weights[m] for m in range(start, stop)})]
        return begin + [
            ("chunk", part, offset, values[offset : offset + self.chunk].copy())
            for offset in range(0, self.size, self.chunk)
            for part, values in enumerate(parts)
            if values is not None
        ]


@st.composite
def cases(draw) -> Case:
    num = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 30))
    workers = draw(st.integers(1, 5))
    cuts = sorted(draw(st.lists(st.integers(0, num), min_size=workers - 1, max_size=workers - 1)))
    scale = draw(st.sampled_from([1e-3, 1.0, 1e6]))
    return Case(
        gradients=[(rng.standard_normal(size) * scale).astype(np.float32) for _ in range(num)],
        weights=draw(st.lists(st.sampled_from([0, 1, 7, 31]), min_size=num, max_size=num)),
        cuts=[0, *cuts, num],
        chunk=draw(st.sampled_from([1, 4, 7, 64])),
    )


def run(case: Case, order: random.Random) -> tuple[np.ndarray, Round, list[int]]:
    """Feeds the frames of all workers in a random interleaving that keeps each worker's own order."""
    round_ = case.open()
    mean, offsets = np.full(case.size, np.nan, np.float32), []
    streams = {worker: case.frames(worker) for worker in range(len(case.cuts) - 1)}
    while streams:
        worker = order.choice(list(streams))
        kind, *content = streams[worker].pop(0)
        if not streams[worker]:
            del streams[worker]
        if kind == "begin":
            emitted = round_.begin(worker, f"w{worker}", round_.spec, content[0])
        else:
            emitted = round_.contribute(worker, *content)
        for reduced in emitted:
            mean[reduced.offset : reduced.offset + reduced.values_C.size] = reduced.values_C
            offsets.append(reduced.offset)
    return mean, round_, offsets


@given(case=cases(), seed=st.integers(0, 2**32))
@settings(max_examples=max(60, settings().max_examples))
def test_mean_has_the_bytes_of_the_definition_for_every_order_of_arrival(case, seed):
    mean, round_, offsets = run(case, random.Random(seed))
    assert round_.complete
    assert round_.held_bytes == 0
    expected = case.expected()
    if expected is None:
        assert offsets == []
        assert round_.total_weight == 0
        return
    assert offsets == list(range(0, case.size, case.chunk)), "each offset once, in order"
    assert mean.tobytes() == expected.tobytes()
    assert round_.square_sum == pytest.approx(float(np.sum(expected.astype(np.float64) ** 2)), rel=1e-12)


@given(case=cases(), other=cases(), seed=st.integers(0, 2**32))
@settings(max_examples=max(25, settings().max_examples))
def test_neither_workers_nor_chunks_show_in_the_bytes(case, other, seed):
    cuts = [0, *sorted(min(cut, case.num_microbatches) for cut in other.cuts[1:-1]), case.num_microbatches]
    again = Case(case.gradients, case.weights, cuts, other.chunk)
    one, first, _ = run(case, random.Random(seed))
    two, second, _ = run(again, random.Random(seed + 1))
    assert one.tobytes() == two.tobytes()
    assert first.total_weight == second.total_weight
    assert first.square_sum == pytest.approx(second.square_sum, rel=1e-12)


def test_negative_zero_survives_a_weightless_neighbour():
    case = Case([np.array([-0.0], np.float32), np.array([0.0], np.float32)], [1, 0], [0, 1, 2], 64)
    mean, _, _ = run(case, random.Random(0))
    assert np.signbit(mean[0])


def test_weight_beyond_float32_is_exact():
    weight = 2**24 + 1
    case = Case([np.array([3.0], np.float32)], [weight], [0, 1], 64)
    mean, _, _ = run(case, random.Random(0))
    assert mean[0] == np.float32(3.0 / weight)


@pytest.fixture
def round_() -> Round:
    opened = Round(
        label="step 3, block 2",
        spec=TensorSpec(dtype="float32", num_elements=10),
        num_microbatches=3,
        chunk_elements=4,
        expected=[0, 1],
    )
    opened.begin(0, "ant", opened.spec, {0: 1, 1: 1})
    return opened


def floats(size: int) -> np.ndarray:
    return np.ones(size, np.float32)


@pytest.mark.parametrize(
    ("part", "offset", "size", "field"),
    [(1, 0, 4, "part"), (7, 0, 4, "part"), (0, 4, 4, "offset"), (0, 0, 3, "length"), (0, 0, 5, "length")],
)
def test_wrong_chunk_is_refused_by_name_before_it_is_mixed(round_, part, offset, size, field):
    with pytest.raises(BadChunk, match=r"step 3, block 2: worker ant") as caught:
        round_.contribute(0, part, offset, floats(size))
    assert caught.value.metadata["field"] == field
    assert round_.held_bytes == 0
    assert round_.contribute(0, 0, 0, floats(4)) == []


def test_chunk_past_the_end_is_refused(round_):
    for offset in (0, 4, 8):
        round_.contribute(0, 0, offset, floats(min(4, 10 - offset)))
    with pytest.raises(BadChunk, match="length"):
        round_.contribute(0, 0, 10, floats(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_value_is_refused_with_its_place(round_, bad):
    round_.contribute(0, 0, 0, floats(4))
    values = floats(4)
    values[2] = bad
    with pytest.raises(NonFinite, match=r"worker ant contributes .* at element 6") as caught:
        round_.contribute(0, 0, 4, values)
    assert caught.value.metadata["worker"] == "ant"
    assert round_.held_bytes == 16


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (TensorSpec(dtype="float32", num_elements=11), "num_elements"),
        (TensorSpec(dtype="bfloat16", num_elements=10), "dtype"),
        (TensorSpec(dtype="float32", num_elements=10, component_sizes=(4, 6)), "component_sizes"),
    ],
)
def test_other_tensor_is_refused_with_both_sides(round_, spec, field):
    with pytest.raises(SpecMismatch, match="worker bee") as caught:
        round_.begin(1, "bee", spec, {2: 1})
    assert caught.value.metadata["field"] == field
    assert round_.open_for == [1]


def test_second_contribution_is_refused(round_):
    with pytest.raises(Duplicate, match="worker ant"):
        round_.begin(0, "ant", round_.spec, {2: 1})
    with pytest.raises(Duplicate, match=r"micro-batches \[1, 3\)"):
        round_.begin(1, "bee", round_.spec, {1: 1, 2: 1})


def test_backlog_counts_chunks_ahead_of_the_mean(round_):
    assert round_.backlog(0) == 0
    round_.contribute(0, 0, 0, floats(4))
    round_.contribute(0, 0, 4, floats(4))
    assert round_.backlog(0) == 2
    round_.begin(1, "bee", round_.spec, {2: 1})
    assert len(round_.contribute(1, 0, 0, floats(4))) == 1
    assert (round_.backlog(0), round_.backlog(1)) == (1, 0)
    assert round_.held_bytes == 16


def test_worker_without_a_share_is_waited_for():
    opened = Round(
        label="step 0, flat",
        spec=TensorSpec(dtype="float32", num_elements=2),
        num_microbatches=1,
        chunk_elements=4,
        expected=[0, 1],
    )
    opened.begin(0, "ant", opened.spec, {0: 2})
    assert opened.contribute(0, 0, 0, np.array([2, 4], np.float32)) == []
    assert not opened.complete
    [reduced] = opened.begin(1, "bee", opened.spec, {})
    assert reduced.values_C.tolist() == [1, 2]
    assert opened.complete
    assert opened.num_contributors == 1
