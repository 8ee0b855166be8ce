"""Workers of one host reduce slices out of one another's memory: the bytes are those of any other way."""

import asyncio
import math
import os
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni.errors import NonFinite, RoundRestarted
from ayni.reduce.digest import SEGMENT, join_digests
from ayni.shm.sources import Source
from tests.support.near_nodes import brought, near_nodes, reduce_all, star, terms
from worker_agent.slice_work import cut

NUM = 8
SHARES = {2: [range(5), range(5, NUM)], 3: [range(2), range(2, 5), range(5, NUM)]}
SHARES[4] = [range(2), range(2, 3), range(3, 5), range(5, NUM)]


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "ayni"


@pytest.mark.parametrize("size", [1, 8191, 3 * SEGMENT + 17, 9 * SEGMENT + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_bytes_hash_and_norm_are_those_of_a_star_and_of_streams(count: int, dtype: str, size: int):
    async def scenario() -> None:
        for is_near in (True, False):
            async with near_nodes(count, is_near=is_near) as made:
                for one in made:
                    one.exchange.regroup(terms(made, one.number, NUM, dtype))
                offers = [(one, brought(one, SHARES[count][one.number], size, NUM)) for one in made]
                await reduce_all(offers)
                mean, digest, squares = star(size, SHARES[count], dtype)
                assert [what.offer.out.tobytes() == mean for _, what in offers] == [True] * count
                taken = sorted(
                    (one for node in made for one in node.rounds.digests()), key=lambda slice_: slice_.first_element
                )
                pieces = [one.digests[i : i + 16] for one in taken for i in range(0, len(one.digests), 16)]
                assert join_digests(pieces) == digest
                assert math.fsum(square for one in taken for square in one.squares) == squares
                sent = sum(one.traffic.sent_bytes for one in made)
                assert (sent < 4000 * count) if is_near else (sent >= size)

    run(scenario())


def test_attempts_follow_one_another_over_the_same_connections_and_memory():
    async def scenario() -> None:
        async with near_nodes(3) as made:
            mean, _, _ = star(2 * SEGMENT, SHARES[3])
            seen = []
            for generation in range(1, 6):
                for one in made:
                    one.exchange.regroup(terms(made, one.number, NUM, generation=generation))
                offers = [(one, brought(one, SHARES[3][one.number], 2 * SEGMENT, NUM)) for one in made]
                await reduce_all(offers)
                assert all(what.offer.out.tobytes() == mean for _, what in offers)
                seen.append((len(os.listdir("/proc/self/fd")), sum(one.vectors.regions.total_bytes for one in made)))
            parts = sum(what.offer.out.nbytes for _, what in offers for _ in what.offer.parts)
            # Only the parts, which this test makes anew each time, are more.
            assert seen[-1][1] - seen[-2][1] == parts

    run(scenario())


def test_groups_whose_slices_are_of_other_sizes_do_not_pile_up_copies():
    async def scenario() -> None:
        async with near_nodes(3) as made:
            copies = []
            for generation in range(1, 16):
                size = SEGMENT + 300 * generation
                for one in made:
                    one.exchange.regroup(terms(made, one.number, NUM, "int8", generation=generation))
                offers = [(one, brought(one, SHARES[3][one.number], size, NUM)) for one in made]
                await reduce_all(offers)
                mean, _, _ = star(size, SHARES[3], "int8")
                assert all(what.offer.out.tobytes() == mean for _, what in offers)
                copies.append(sum(len(free) for one in made for free in one.vectors._staging.values()))
            assert copies[-1] <= 5 * copies[0]

    run(scenario())


def test_a_contribution_that_was_given_up_reaches_no_mean():
    """Its region's generation says so, even while its stream looks alive."""

    async def scenario() -> None:
        async with near_nodes(2) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number, NUM))
            torn = brought(made[1], SHARES[2][1], 3 * SEGMENT, NUM)
            first = asyncio.create_task(made[1].exchange.reduce(torn))
            await asyncio.wait({first}, timeout=0.3)
            for part in torn.offer.parts:
                assert part is not None
                found = made[1].vectors.regions.find(part)
                assert found
                found[0].renew()
                keep = part.copy()
                part.fill(np.float32(7))
                part[:] = keep
            whole = brought(made[0], SHARES[2][0], 3 * SEGMENT, NUM)
            await asyncio.gather(first, made[0].exchange.reduce(whole))
            mean, _, _ = star(3 * SEGMENT, SHARES[2])
            assert whole.offer.out.tobytes() == torn.offer.out.tobytes() == mean

    run(scenario())


def test_memory_whose_generation_is_another_one_restarts_the_slice():
    async def scenario() -> None:
        async with near_nodes(1) as made:
            made[0].exchange.regroup(terms(made, 0, NUM))
            vectors, rounds = made[0].vectors, made[0].rounds
            part = vectors.new(SEGMENT)
            found = vectors.regions.find(part)
            assert found
            live = _admitted(made[0], SEGMENT)
            live.lend(0, 0, Source(region=found[0], generation=found[0].generation, data=_bytes(part), dtype="float32"))
            found[0].renew()
            with pytest.raises(RoundRestarted, match="given up before it was added everywhere"):
                await live.next_chunk()
            assert rounds.stores.regions is vectors.regions

    run(scenario())


def _bytes(part: np.ndarray) -> np.ndarray:
    return part.view(np.uint8)


def _admitted(node: Any, size: int) -> Any:

    what = brought(node, range(1), size, 1)
    one = terms([node], node.number, 1)
    node.exchange.regroup(one)
    (work,) = cut(what, one)
    return node.rounds.begin(work.offer)


def test_what_is_not_finite_is_found_and_named():
    async def scenario() -> None:
        async with near_nodes(2) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number, NUM))
            bad = brought(made[1], SHARES[2][1], 3 * SEGMENT, NUM)
            part = bad.offer.parts[0]
            assert part is not None
            part[2 * SEGMENT + 5] = np.inf
            offers = [(made[0], brought(made[0], SHARES[2][0], 3 * SEGMENT, NUM)), (made[1], bad)]
            ended = await asyncio.gather(*(one.exchange.reduce(what) for one, what in offers), return_exceptions=True)
            assert all(isinstance(error, NonFinite) for error in ended), ended
            assert "worker w1 contributes inf at element" in str(ended[0])

    run(scenario())


def test_who_does_not_know_the_groups_secret_contributes_nothing():
    async def scenario() -> None:
        async with near_nodes(2) as made:
            made[0].exchange.regroup(terms(made, 0, NUM))
            made[1].exchange.regroup(terms(made, 1, NUM))

            told = terms(made, 1, NUM)
            strange = replace(told, group=replace(told.group, secret="f" * 16))
            made[1].exchange.regroup(replace(strange, moment=told.moment))
            task = asyncio.create_task(made[1].exchange.reduce(brought(made[1], SHARES[2][1], 3 * SEGMENT, NUM)))
            await asyncio.wait({task}, timeout=2)
            assert not task.done()
            assert set(made[1].lost) == {0}
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(scenario())


def test_an_owner_whose_socket_is_gone_is_reached_over_grpc(own_folder: Path):
    async def scenario() -> None:
        async with near_nodes(2) as made:
            for one in made:
                one.exchange.regroup(terms(made, one.number, NUM))
            assert made[1].offer
            (own_folder / made[1].offer.socket_name).unlink()
            offers = [(one, brought(one, SHARES[2][one.number], 3 * SEGMENT, NUM)) for one in made]
            await reduce_all(offers)
            mean, _, _ = star(3 * SEGMENT, SHARES[2])
            assert all(what.offer.out.tobytes() == mean for _, what in offers)
            assert made[0].traffic.sent_bytes > SEGMENT * 4 > made[1].traffic.sent_bytes

    run(scenario())
