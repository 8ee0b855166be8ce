"""The object server of two groups is killed while one of them stores and the other one loads."""

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import obstore
import pytest

from ayni.blocks.objects import KeyReport, OutcomeState, PresenceState
from tests.support import seaweedfs
from tests.support.block_groups import keys, soon
from tests.support.seaweedfs import SeaweedFS
from tests.support.serve_agents import crew
from tests.support.served_groups import HOST, LATE_S, ServedGroup, check_same, served

NUM_KEYS = 512
NUM_BLOCKS = NUM_KEYS + 2
IDS = np.arange(1, NUM_KEYS + 1)
"""All blocks but a guard on either side."""
STORED, NEW = (keys(*range(NUM_KEYS), name=name) for name in ("stored", "new"))
TIMEOUT_S = 20.0
PREFIX = "group-faults/"

PUT, GOT, BEFORE = range(1, 4)
"""What blocks are filled with."""


@pytest.fixture
def server() -> Iterator[SeaweedFS]:
    """The server that others use too: it runs again afterwards."""
    shared = seaweedfs.shared()
    yield shared
    if shared.process.poll() is not None:
        shared.restart()


def test_server_killed_while_groups_store_and_load(server: SeaweedFS):
    async def test() -> None:
        shared = crew()
        store = server.config(PREFIX, timeout_s=3)
        async with (
            served(shared, shared.halves(), host_blocks=NUM_BLOCKS, store=store) as putter,
            served(shared, shared.quarters()[:2], host_blocks=NUM_BLOCKS, store=store) as getter,
        ):
            await putter.fill(PUT)
            await getter.fill(GOT)
            assert (await getter.leader.put_blocks(HOST, IDS, STORED, timeout_s=TIMEOUT_S)).is_done
            await getter.fill(BEFORE)
            put, got = await killed_in_the_middle(server, putter, getter)
            check_put(put)
            check_got(got, getter)
            await check_presence(getter)
            await asyncio.to_thread(server.restart)
            await check_afterwards(putter, getter, put)

    asyncio.run(test())


async def killed_in_the_middle(
    server: SeaweedFS, putter: ServedGroup, getter: ServedGroup
) -> tuple[KeyReport, KeyReport]:
    """Returns how a put and a get of all keys ended that were in their middle when the server was killed."""
    num_stored = len(await asyncio.to_thread(objects, server))
    calls = [
        asyncio.ensure_future(putter.leader.put_blocks(HOST, IDS, NEW, timeout_s=TIMEOUT_S)),
        asyncio.ensure_future(getter.leader.get_blocks(STORED, HOST, IDS, timeout_s=TIMEOUT_S)),
    ]
    before = getter.content(BEFORE, 0)
    await until(lambda: (getter.view(0)[IDS] != before[IDS]).any())
    async with asyncio.timeout(TIMEOUT_S):
        while len(await asyncio.to_thread(objects, server)) < num_stored + 20:
            pass
    assert not any(call.done() for call in calls), "a call was over before the server was killed"
    server.process.kill()
    put, got = await soon(asyncio.gather(*calls), "calls whose server is gone", TIMEOUT_S + LATE_S)
    return put, got


def objects(server: SeaweedFS) -> list[str]:
    return [meta["path"] for batch in obstore.list(server.raw(), PREFIX) for meta in batch]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        # Nobody tells of the first block.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def check_put(report: KeyReport) -> None:
    """Each key of each rank is stored or has failed, and the group's outcome is that of its worst rank."""
    for outcome, by_rank in zip(report.outcomes, zip(*report.by_rank, strict=True), strict=True):
        assert {one.state for one in by_rank} <= {OutcomeState.DONE, OutcomeState.FAILED}
        assert outcome.is_success == all(one.is_success for one in by_rank)
    check_failures(report)


def check_failures(report: KeyReport) -> None:
    assert not report.is_done
    assert {outcome.failure.reason for outcome in report.outcomes if outcome.failure} == {"STORAGE_FAILED"}


def check_got(report: KeyReport, getter: ServedGroup) -> None:
    """What was loaded is right, what was not has the old bytes, and nothing that is stored counts as absent."""
    check_failures(report)
    for rank, outcomes in enumerate(report.by_rank):
        states = np.array([outcome.state.value for outcome in outcomes if outcome])
        assert set(states) <= {"done", "failed"}
        expected = getter.content(BEFORE, rank)
        done = IDS[states == "done"]
        expected[done] = getter.content(GOT, rank)[done]
        check_same(getter.view(rank), expected)
    assert any(outcome and outcome.is_success for outcomes in report.by_rank for outcome in outcomes)


async def check_presence(getter: ServedGroup) -> None:
    report = await soon(getter.leader.has_blocks(HOST, STORED, timeout_s=TIMEOUT_S), "a question", TIMEOUT_S + LATE_S)
    states = {presence.state for presences in report.by_rank for presence in presences}
    assert states == {PresenceState.UNKNOWN}
    assert {presence.failure.reason for presence in report.presences if presence.failure} == {"STORAGE_FAILED"}


async def check_afterwards(putter: ServedGroup, getter: ServedGroup, put: KeyReport) -> None:
    """The next calls work, and what was called stored is stored."""
    done = [place for place, outcome in enumerate(put.outcomes) if outcome.is_success]
    report = await putter.leader.has_blocks(HOST, NEW, timeout_s=TIMEOUT_S)
    for rank, presences in enumerate(report.by_rank):
        states = [presence.state for presence in presences]
        assert PresenceState.UNKNOWN not in states, rank
        assert {states[place] for place in done} <= {PresenceState.PRESENT}
    assert (await putter.leader.put_blocks(HOST, IDS, NEW, timeout_s=TIMEOUT_S)).is_done
    await putter.fill(BEFORE)
    assert (await putter.leader.get_blocks(NEW, HOST, IDS, timeout_s=TIMEOUT_S)).is_done
    assert (await getter.leader.get_blocks(STORED, HOST, IDS, timeout_s=TIMEOUT_S)).is_done
    for group, label in ((putter, PUT), (getter, GOT)):
        for rank in range(group.size):
            expected = group.content(BEFORE, rank)
            expected[IDS] = group.content(label, rank)[IDS]
            check_same(group.view(rank), expected)
