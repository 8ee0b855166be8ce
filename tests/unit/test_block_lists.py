"""Lists of blocks and keys, checked before anybody is asked."""

import pytest

from ayni.blocks.ids import as_ids
from ayni.errors import BadRequest
from coordinator_service.block_lists import check_keys, check_lengths, check_pairs


def test_pairs_pass():
    check_pairs(3, as_ids([2, 0, 1]))
    check_pairs(0, as_ids([]))


@pytest.mark.fact("T81")
def test_lists_of_different_lengths_are_refused_with_both():
    with pytest.raises(BadRequest, match="3 source blocks and 2 destination blocks"):
        check_pairs(3, as_ids([0, 1]))
    with pytest.raises(BadRequest, match="1 source blocks and 2 keys") as caught:
        check_lengths("source blocks", 1, "keys", 2)
    assert caught.value.metadata["field"] == "keys"


@pytest.mark.fact("T78")
def test_destination_blocks_that_come_twice_are_all_named():
    with pytest.raises(BadRequest, match="destination blocks 1, 3 come more than once"):
        check_pairs(7, as_ids([0, 1, 2, 1, 3, 3, 1]))
    with pytest.raises(BadRequest, match="6, 7 and 4 more come more than once"):
        check_pairs(24, as_ids([*range(12), *range(12)]))


def test_keys_that_come_twice_are_named():
    check_keys([b"a", b"b"])
    with pytest.raises(BadRequest, match="keys 6162 come more than once"):
        check_keys([b"ab", b"c", b"ab"])
