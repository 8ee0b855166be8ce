"""What an owner writes into a pool's control memory, as its readers see it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ayni.errors import StaleEpoch
from worker_agent.blocks.pool_control import PoolControl, control_bytes, is_being_written


def both_sides(num_blocks: int = 10) -> tuple[PoolControl, PoolControl]:
    """Returns an owner's view and a reader's, which can't write."""
    memory = np.zeros(control_bytes(num_blocks), np.uint8)
    reading = memory.view()
    reading.setflags(write=False)
    return PoolControl(memory), PoolControl(reading)


def test_pool_is_open_from_lending_to_withdrawal_under_one_incarnation_and_epoch():
    owner, reader = both_sides()
    with pytest.raises(StaleEpoch):
        reader.check(7, 1)
    assert owner.lend(7) == 1
    reader.check(7, 1)
    with pytest.raises(StaleEpoch) as other_start:
        reader.check(8, 1)
    owner.withdraw()
    with pytest.raises(StaleEpoch, match="connect to it again"):
        reader.check(7, 1)
    assert owner.lend(7) == 2
    with pytest.raises(StaleEpoch) as lent_again:
        reader.check(7, 1)
    reader.check(7, 2)
    assert other_start.value.metadata == {"epoch": "1", "current_epoch": "1"}
    assert lent_again.value.metadata == {"epoch": "1", "current_epoch": "2"}


def test_incarnation_has_all_of_its_bits():
    owner, reader = both_sides()
    owner.lend((1 << 64) - 1)
    reader.check((1 << 64) - 1, 1)
    with pytest.raises(StaleEpoch):
        reader.check((1 << 64) - 2, 1)


@given(writes=st.lists(st.sets(st.integers(0, 9), min_size=1), max_size=6))
def test_versions_are_odd_while_a_block_is_written_and_never_come_back(writes):
    owner, reader = both_sides()
    everything = np.arange(10)
    seen = [{0} for _ in range(10)]
    for blocks in writes:
        ids = np.array(sorted(blocks))
        owner.begin_write(ids)
        assert set(np.flatnonzero(is_being_written(reader.versions(everything))).tolist()) == blocks
        owner.end_write(ids)
        versions = reader.versions(everything)
        assert not is_being_written(versions).any()
        for block in blocks:
            assert int(versions[block]) not in seen[block]
            seen[block].add(int(versions[block]))


def test_versions_are_those_of_their_moment_and_repeated_ids_count_once():
    owner, reader = both_sides()
    before = reader.versions(np.array([3, 3]))
    owner.begin_write(np.array([3, 3]))
    assert before.tolist() == [0, 0]
    assert reader.versions(np.array([3])).tolist() == [1]
    owner.end_write(np.array([3, 3]))
    assert reader.versions(np.array([3, 4])).tolist() == [2, 0]


def test_reader_can_not_write_and_a_closed_view_is_of_nothing():
    owner, reader = both_sides()
    owner.lend(7)
    for write in (lambda: reader.lend(1), reader.withdraw, lambda: reader.begin_write(np.array([1]))):
        with pytest.raises(ValueError, match="read-only"):
            write()
    reader.close()
    with pytest.raises(StaleEpoch):
        reader.check(7, 1)
