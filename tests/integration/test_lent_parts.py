"""Parts in shared memory that are lent wrongly, or given up while they are added."""

import numpy as np
import pytest

from ayni.errors import AyniError, BadChunk, NonFinite, RoundRestarted
from ayni.shm.regions import Region
from ayni.shm.sources import Source
from tests.support.slice_rounds import gradients, offer, opened, reference, run, take, terms


def lent(values: np.ndarray) -> tuple[Region, Source]:
    region = Region(values.nbytes)
    region.bytes.view(np.float32)[:] = values
    data = region.bytes[:]
    data.flags.writeable = False
    return region, Source(region=region, generation=region.generation, data=data, dtype="float32")


def parts() -> tuple[list, list[np.ndarray]]:
    """Two contributions to one slice, and the one part of each."""
    own, rounds, leaves = terms(), opened(), gradients()
    made = [rounds.begin(offer(worker, range(2 * worker, 2 * worker + 2), own)) for worker in range(2)]
    slice_ = slice(made[0].offer.start, made[0].offer.stop)
    return made, [(leaves[0] + leaves[1])[slice_], (leaves[2] + leaves[3])[slice_]]


@pytest.mark.parametrize("order", ["aba", "aab", "abb"])
def test_a_part_that_is_lent_twice_is_refused_by_name(order: str):
    async def scenario() -> None:
        made, values = parts()
        sources = [lent(value) for value in values]
        for letter in order:
            made["ab".index(letter)].lend(0, 0, sources["ab".index(letter)][1])
        twice = made["ab".index(max(order, key=order.count))]
        with pytest.raises(BadChunk, match=rf"worker w{twice.offer.worker_id} sends a chunk with offset"):
            await take(twice)

    run(scenario())


@pytest.mark.parametrize("is_short", [False, True], ids=["runs", "chunks"])
def test_a_part_that_was_given_up_is_not_blamed_for_what_was_written_there_since(is_short: bool):
    async def scenario() -> None:
        made, values = parts()
        sources = [lent(value) for value in values]
        if is_short:
            sources[1] = lent(values[1][:20000])
        for one, (_, source) in zip(made, sources, strict=True):
            one.lend(0, 0, source)
        sources[1][0].renew()
        sources[1][0].bytes.view(np.float32)[:] = np.nan
        for one in made:
            with pytest.raises(RoundRestarted, match="given up before it was added everywhere"):
                await take(one)

    run(scenario())


def test_a_part_that_is_not_finite_is_refused_by_the_name_of_its_worker():
    async def scenario() -> None:
        made, values = parts()
        values[1][70000] = np.inf
        for one, value in zip(made, values, strict=True):
            one.lend(0, 0, lent(value)[1])
        found: list[AyniError] = []
        for one in made:
            with pytest.raises(NonFinite) as raised:
                await take(one)
            found.append(raised.value)
        assert all(error.metadata["worker"] == "w1" for error in found)

    run(scenario())


def test_parts_that_are_lent_rightly_make_up_the_mean():
    async def scenario() -> None:
        made, values = parts()
        for one, value in zip(made, values, strict=True):
            one.lend(0, 0, lent(value)[1])
        start, stop = made[0].offer.start, made[0].offer.stop
        for one in made:
            assert (await take(one)).tobytes() == reference("float32")[0][start:stop].tobytes()

    run(scenario())
