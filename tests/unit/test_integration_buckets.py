"""How parameters are cut into buckets, and samples among workers."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.integrations.buckets import cut
from worker_agent.integrations.sharding import shard


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 60))
def test_every_parameter_has_one_place_and_the_last_ones_leave_first(sizes: list[int], most: int):
    named = {f"p{index}": size for index, size in enumerate(sizes)}
    specs = cut(named, most)
    assert [name for spec in specs for name in spec.names] == list(reversed(named))
    assert [spec.bucket.index for spec in specs] == list(range(len(specs)))
    for spec in specs:
        assert spec.num_elements <= most or len(spec.names) == 1
        assert sum(spec.component_sizes) == spec.num_elements
        assert len(spec.component_sizes) == 9


def test_what_can_not_be_cut_is_refused():
    with pytest.raises(ValueError, match="no trainable parameters"):
        cut({})
    with pytest.raises(ValueError, match="no elements: odd"):
        cut({"even": 2, "odd": 0})


class Selectable(list):
    """What a `datasets.Dataset` can do, as far as it matters."""

    def select(self, indices: range) -> "Selectable":
        return Selectable(self[index] for index in indices)


@given(st.integers(1, 5), st.integers(0, 30))
def test_parts_are_disjoint_equally_long_and_leave_less_than_a_round_out(world_size: int, extra: int):
    samples = list(range(world_size + extra))
    for kind in (samples, Selectable(samples), iter):
        parts = [
            list(shard(map(int, samples) if kind is iter else kind, rank, world_size)) for rank in range(world_size)
        ]
        assert len({len(part) for part in parts}) == 1
        together = sorted(sample for part in parts for sample in part)
        assert together == samples[: len(samples) // world_size * world_size]


def test_what_is_no_data_set_is_refused():
    with pytest.raises(TypeError, match="a int is no data set"):
        shard(5, 0, 2)
    with pytest.raises(ValueError, match="1 samples for 2 workers"):
        shard([1], 0, 2)
    with pytest.raises(ValueError, match="rank is 2"):
        shard([1, 2], 2, 2)
    assert type(shard(Selectable([1, 2, 3]), 0, 2)) is Selectable


def test_an_iterable_is_told_which_pass_begins():
    class Shuffled:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([0, 1, 2, 3] if self.epoch == 0 else [3, 2, 1, 0])

    samples = Shuffled()
    part = shard(samples, 1, 2)
    assert list(part) == [1, 3]
    part.set_epoch(1)
    assert list(part) == [2, 0]
    shard(map(int, [1, 2]), 0, 2).set_epoch(1)


def test_several_data_sets_by_name_are_refused_and_samples_by_number_in_a_mapping_are_not():
    with pytest.raises(TypeError, match="a dict is no data set but has several by name: give one of train, test"):
        shard({"train": [1, 2], "test": [3, 4]}, 0, 2)
    assert list(shard({0: "a", 1: "b"}, 1, 2)) == ["b"]
