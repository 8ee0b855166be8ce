"""No two transfers meet in a block."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from ayni.errors import BlockBusy, UnknownLayout
from worker_agent.blocks.occupancy import Claim, Occupancy

NUM_BLOCKS = 6
ids = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4)


def array(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


@pytest.fixture
def occupancy() -> Occupancy:
    occupancy = Occupancy()
    for key in ("host layout", "disk layout"):
        occupancy.add(key, NUM_BLOCKS)
    return occupancy


def test_a_block_that_is_written_is_neither_written_nor_read(occupancy):
    claim = occupancy.claim(writes=[("host layout", array(1, 2))])
    with pytest.raises(BlockBusy, match="block 2 of host layout is being written by another transfer") as refusal:
        occupancy.claim(writes=[("host layout", array(3, 2))])
    assert refusal.value.metadata == {"layout": "host layout", "block": "2"}
    with pytest.raises(BlockBusy, match="block 1 of host layout is being written"):
        occupancy.claim(reads=[("host layout", array(1))])
    occupancy.release(claim)
    occupancy.release(occupancy.claim(writes=[("host layout", array(3, 2))]))


def test_a_block_that_is_read_is_read_by_others_but_not_written(occupancy):
    readers = [occupancy.claim(reads=[("host layout", array(4, 4, 5))]) for _ in range(2)]
    for reader in readers:
        with pytest.raises(BlockBusy, match="block 4 of host layout is being read by another transfer"):
            occupancy.claim(writes=[("host layout", array(4))])
        occupancy.release(reader)
    occupancy.claim(writes=[("host layout", array(4))])


def test_layouts_have_blocks_of_their_own(occupancy):
    occupancy.claim(reads=[("host layout", array(0))], writes=[("disk layout", array(0))])
    with pytest.raises(BlockBusy):
        occupancy.claim(reads=[("disk layout", array(0))])


def test_all_blocks_are_taken_or_none(occupancy):
    held = occupancy.claim(writes=[("disk layout", array(5))])
    for reads, writes in (
        ([("disk layout", array(5))], [("host layout", array(0, 1))]),
        ([("host layout", array(0))], [("host layout", array(1)), ("disk layout", array(4, 5))]),
    ):
        with pytest.raises(BlockBusy):
            occupancy.claim(reads, writes)
    occupancy.claim(writes=[("host layout", array(*range(NUM_BLOCKS))), ("disk layout", array(0, 1, 2, 3, 4))])
    occupancy.release(held)


def test_a_claim_is_given_back_once(occupancy):
    claim = occupancy.claim(reads=[("host layout", array(0))])
    occupancy.release(claim)
    with pytest.raises(AssertionError, match="given back twice"):
        occupancy.release(claim)
    with pytest.raises(AssertionError, match="reads and writes one block"):
        occupancy.claim([("host layout", array(0))], [("host layout", array(0))])


def test_a_layout_is_given_up_when_nothing_uses_it(occupancy):
    claim = occupancy.claim(reads=[("host layout", array(3))])
    assert not occupancy.is_idle("host layout")
    with pytest.raises(BlockBusy, match="block 3 of host layout is in use"):
        occupancy.remove("host layout")
    occupancy.release(claim)
    assert occupancy.is_idle("host layout")
    occupancy.remove("host layout")
    with pytest.raises(UnknownLayout, match="host layout"):
        occupancy.claim(reads=[("host layout", array(3))])


def test_an_id_list_that_changes_later_does_not_change_a_claim(occupancy):
    blocks = array(1)
    claim = occupancy.claim(writes=[("host layout", blocks)])
    blocks[0] = 2
    occupancy.release(claim)
    assert occupancy.is_idle("host layout")


def test_millions_of_blocks_are_claimed_at_once():
    occupancy = Occupancy()
    occupancy.add("large", 4_000_000)
    claim = occupancy.claim(
        reads=[("large", np.arange(2_000_000))], writes=[("large", np.arange(2_000_000, 4_000_000))]
    )
    with pytest.raises(BlockBusy, match="block 3999999"):
        occupancy.claim(writes=[("large", array(3_999_999))])
    occupancy.release(claim)
    assert occupancy.is_idle("large")


class Transfers(RuleBasedStateMachine):
    """Claims and releases in any order, against sets."""

    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.occupancy = Occupancy()
        self.occupancy.add("layout", NUM_BLOCKS)
        self.held: list[tuple[Claim, set[int], set[int]]] = []

    @rule(target=claims, reads=ids, writes=st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=3))
    def claim(self, reads, writes):
        reads = [block for block in reads if block not in writes]
        written = {block for _, _, others in self.held for block in others}
        used = written.union(*(others for _, others, _ in self.held))
        allowed = not writes & used and not set(reads) & written
        lists = [("layout", array(*reads))], [("layout", array(*writes))]
        if not allowed:
            with pytest.raises(BlockBusy) as busy:
                self.occupancy.claim(*lists)
            assert int(busy.value.metadata["block"]) in writes & used | set(reads) & written
            return multiple()
        claim = self.occupancy.claim(*lists)
        self.held.append((claim, set(reads), set(writes)))
        return claim

    @rule(claim=consumes(claims))
    def release(self, claim):
        self.occupancy.release(claim)
        self.held = [held for held in self.held if held[0] is not claim]

    @invariant()
    def idle_when_nothing_is_held(self):
        assert self.occupancy.is_idle("layout") == (not any(reads | writes for _, reads, writes in self.held))


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=8, stateful_step_count=12)
