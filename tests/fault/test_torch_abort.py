"""What ends a collective whose peer does not answer: the end of its connections, and nothing that Gloo offers."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from tests.support.torch_members import Member, brought, group_of, members, terms_of
from tests.support.torch_offers import offer
from worker_agent.torch_collectives import Collectives, GroupPlan
from worker_agent.torch_store import RendezvousStore, StoreClients

PROMPT_S = 2.0


def on_thread(work: Callable[[], object]) -> "Future[object]":
    """Does something on a thread; returns what came of it."""
    outcome: Future[object] = Future()

    def do() -> None:
        try:
            outcome.set_result(work())
        except RuntimeError as error:
            outcome.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return outcome


def pair() -> tuple[RendezvousStore, list[Collectives]]:
    """Two members that were built."""
    store = RendezvousStore("127.0.0.1")

    def build(rank: int) -> Collectives:
        plan = GroupPlan(generation=1, prefix="1-secret", host="127.0.0.1", rank=rank, size=2)
        return Collectives(plan, StoreClients(store.address).below(plan.prefix, "building"))

    building = [on_thread(lambda rank=rank: build(rank)) for rank in (0, 1)]  # type: ignore[misc]
    return store, [one.result(30) for one in building]  # type: ignore[misc]


def test_gloo_does_not_abort_and_the_end_of_its_connections_does():
    store, (ant, bee) = pair()
    waiting = on_thread(lambda: ant.all_reduce(np.ones(1000, np.float32)))
    for end in (ant._gloo.abort, ant._gloo.shutdown):
        end()
    with pytest.raises(TimeoutError):
        waiting.result(1)
    began = time.monotonic()
    ant.abort()
    with pytest.raises(RuntimeError):
        waiting.result(PROMPT_S)
    assert time.monotonic() - began < PROMPT_S
    # The other one sees the end of the connection, and is not left waiting either.
    with pytest.raises(RuntimeError):
        on_thread(lambda: bee.all_reduce(np.ones(1000, np.float32))).result(PROMPT_S)
    store.close()


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def left_behind(rounds: int) -> list[tuple[float, float]]:
    """Has a member lose a stopped one again and again.

    Returns:
        For each time, how long it took until the loss was over for who waited, and for the group's thread.
    """
    took = []
    async with members(1) as own:
        exchange = own.exchanges[0]
        for number in range(rounds):
            other = Member.start(1, 60.0, "worker.contribution.half=stop")
            try:
                group = group_of([own.stores[0], other.ready().store], generation=2 * number + 1)
                exchange.regroup(terms_of(group, 0))
                other.tell(group=[member.store_address for member in group.members], generation=group.generation)
                other.tell(reduce={"range": [1, 2, 2], "step": 0})
                waiting = asyncio.create_task(exchange.reduce(brought(offer(0, 1, 2))))
                await asyncio.to_thread(os.waitid, os.P_PID, other.process.pid, os.WSTOPPED)
                assert exchange._newest
                old = exchange._newest.torch
                began = time.monotonic()
                exchange.regroup(terms_of(group_of(own.stores, generation=2 * number + 2), 0))
                await asyncio.wait({waiting}, timeout=30)
                failed = time.monotonic() - began
                assert waiting.exception()
                assert await asyncio.to_thread(old.join, 30)
                took.append((failed, time.monotonic() - began))
            finally:
                other.process.send_signal(signal.SIGCONT)
                other.kill()
    return took


def test_who_loses_a_stopped_member_is_free_at_once_and_nothing_of_the_group_is_left():
    asyncio.run(left_behind(1))
    before = held()
    took = asyncio.run(left_behind(2))
    print("seconds until (who waited, the group's thread) was free:", took)
    assert max(failed for failed, _ in took) < PROMPT_S
    assert max(ended for _, ended in took) < PROMPT_S
    after = held()
    assert after[0] <= before[0], (before, after)
    assert after[1] <= before[1], (before, after)
