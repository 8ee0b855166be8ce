"""The slices that an owner reduces: bytes, back-pressure, streams that begin again, groups that change."""

import asyncio
from typing import Any

import numpy as np
import pytest

from ayni.reduce.digest import SEGMENT, join_digests
from tests.support.slice_rounds import (
    CHUNK_BYTES,
    NUM_ELEMENTS,
    gradients,
    offer,
    opened,
    parts_of,
    reference,
    run,
    send,
    take,
    terms,
    whole_part,
)
from worker_agent.slice_contribution import WINDOW_CHUNKS
from worker_agent.slice_rounds import SliceRounds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_slices_are_the_bytes_hash_and_norm_of_one_reduction(dtype):
    async def reduce(owner: int) -> tuple[np.ndarray, Any]:
        own = terms(owner, dtype=dtype)
        rounds = SliceRounds()
        rounds.open(own)
        shares = [range(2), range(2, 3), range(3, 4)]
        contributions = [rounds.begin(offer(worker, share, own)) for worker, share in enumerate(shares)]
        async with asyncio.TaskGroup() as group:
            taking = [group.create_task(take(one)) for one in contributions]
            for one, share in zip(contributions, shares, strict=True):
                group.create_task(send(one, parts_of(share, gradients())))
        means = [task.result().tobytes() for task in taking]
        assert len(set(means)) == 1
        (digest,) = rounds.digests()
        return taking[0].result(), digest

    results = [run(reduce(owner)) for owner in range(2)]
    mean, whole = reference(dtype)
    assert np.concatenate([values for values, _ in results]).tobytes() == mean.tobytes()
    digests = [digest for _, digest in results]
    pieces = [d.digests[i : i + 16] for d in digests for i in range(0, len(d.digests), 16)]
    assert join_digests(pieces) == whole.digest
    assert [(d.first_element, d.num_elements) for d in digests] == [(0, 2 * SEGMENT), (2 * SEGMENT, 1000)]


def test_who_comes_late_reads_the_mean_from_its_beginning():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        first = rounds.begin(offer(0, range(4), own))
        await send(first, whole_part())
        early = await take(first)
        late = rounds.begin(offer(1, range(0), own))
        assert (await take(late)).tobytes() == early.tobytes()
        assert early.size == 2 * SEGMENT

    run(scenario())


def test_what_was_taken_down_of_a_slice_in_part_says_so():
    async def scenario() -> None:
        own, rounds = terms(num_owners=1), opened(terms(num_owners=1))
        contribution = rounds.begin(offer(0, range(4), own))
        assert [one.num_elements for one in rounds.digests()] == [0]
        await send(contribution, whole_part(), 3)
        (half,) = rounds.digests()
        assert (half.num_elements, half.bucket_elements) == (3 * CHUNK_BYTES // 4, NUM_ELEMENTS)

    run(scenario())


def test_a_reader_that_stops_holds_nobody_up():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        sender, slow = rounds.begin(offer(0, range(4), own)), rounds.begin(offer(1, range(0), own))
        first_chunk = asyncio.create_task(slow.next_chunk())
        await send(sender, whole_part())
        mean = await take(sender)
        assert await first_chunk == (0, CHUNK_BYTES // 4)
        rest = await take(slow)
        assert rest.tobytes() == mean[CHUNK_BYTES // 4 :].tobytes()

    run(scenario())


def test_an_extra_lease_is_sent_no_mean_and_ends_with_it():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        extra = rounds.begin(offer(0, range(4), own, takes_mean=False))
        await send(extra, whole_part())
        assert await extra.next_chunk() is None

    run(scenario())


def test_nothing_is_read_that_is_a_window_ahead():
    async def scenario() -> None:
        own, rounds = terms(num_owners=1), opened(terms(num_owners=1))
        ahead = rounds.begin(offer(0, range(2), own))
        leaves = gradients()
        sending = asyncio.create_task(send(ahead, [leaves[0] + leaves[1]]))
        await asyncio.sleep(0)
        assert ahead.backlog == WINDOW_CHUNKS
        assert NUM_ELEMENTS * 4 > WINDOW_CHUNKS * CHUNK_BYTES
        assert not sending.done()
        other = rounds.begin(offer(1, range(2, 4), own))
        await asyncio.gather(send(other, [leaves[2] + leaves[3]]), sending)
        assert ahead.backlog == 0

    run(scenario())


def test_the_loss_of_all_is_known_when_each_is():
    async def scenario() -> None:
        own, rounds = terms(), opened()
        contribution = rounds.begin(offer(0, range(4), own))
        assert contribution.live.totals() == (6.0 / 10, 0, 0)

    run(scenario())
