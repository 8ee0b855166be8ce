"""A worker is handed the run's state: pulled from a peer, through the coordinator, or loaded from the store."""

import logging
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ayni.blocks.ids import as_ids
from ayni.blocks.state_keys import state_keys
from ayni.errors import (
    BadRequest,
    Checksum,
    Deadline,
    Incompatible,
    IncompatibleLayout,
    PeerLost,
    UnknownLayout,
    UnknownObject,
)
from ayni.run_config import StateConfig
from tests.support.attached_agent import SESSION, Coordinator, attached, coordinating, hidden
from tests.support.state_peers import (
    BLOCK_BYTES,
    LIMIT_S,
    RUN_ID,
    StatePeer,
    facts_of,
    state_peer,
    state_program,
    tensors_of,
)
from worker_agent.assignment_frames import StateOffer
from worker_agent.bridge import shared
from worker_agent.offered_states import Answers, OfferedStates
from worker_agent.train_state import PLACE, Loaded

LARGE = 24 << 20
"""Elements of a state that takes a while."""


def same(loaded: Loaded, steps: int, num_elements: int = 100_000) -> bool:
    tensors, facts = loaded
    expected = tensors_of(steps, num_elements)
    return facts == facts_of(steps) and all(torch.equal(tensors[name], expected[name]) for name in expected)


@contextmanager
def two_peers(folder: Path, *engines: str) -> Iterator[tuple[StatePeer, StatePeer]]:
    with state_peer(folder / "a", *engines) as giver, state_peer(folder / "b", *engines) as taker:
        yield giver, taker


@pytest.mark.parametrize("engines", [("shm", "grpc"), ("grpc",)], ids=["shm", "grpc"])
def test_a_state_is_pulled_from_a_peer_and_counts_as_published_then(
    tmp_path: Path, engines: tuple[str, ...], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    with two_peers(tmp_path, *engines) as (giver, taker), state_peer(tmp_path / "c", *engines) as third:
        giver.publish(5)
        assert same(taker.onboarding().take(giver.offer(5)).result(LIMIT_S), 5)
        assert taker.state.published_steps == 5
        assert f"got the state behind step 5 from worker ant through {engines[0]}" in caplog.text
        # It can be handed on from here, and replaced by what is published next.
        assert same(third.onboarding().take(taker.offer(5)).result(LIMIT_S), 5)
        taker.publish(6)
        assert same(third.onboarding().take(taker.offer(6)).result(LIMIT_S), 6)


def test_a_state_of_another_size_takes_the_place_of_the_one_before(tmp_path: Path):
    with two_peers(tmp_path) as (giver, taker):
        giver.publish(5)
        onboarding = taker.onboarding()
        assert same(onboarding.take(giver.offer(5)).result(LIMIT_S), 5)
        giver.publish(6, 300_000)
        assert same(onboarding.take(giver.offer(6)).result(LIMIT_S), 6, 300_000)


def test_a_later_state_than_the_offered_one_does_as_well_and_an_earlier_one_does_not(tmp_path: Path):
    with two_peers(tmp_path) as (giver, taker):
        giver.publish(6)
        onboarding = taker.onboarding()
        assert same(onboarding.take(giver.offer(5)).result(LIMIT_S), 6)
        assert taker.state.published_steps == 6
        with pytest.raises(Incompatible, match="the state behind step 7"):
            onboarding.take(giver.offer(7)).result(LIMIT_S)
        assert taker.state.published_steps == 0


def test_a_state_is_pulled_through_the_coordinator_from_a_peer_that_nobody_can_dial(tmp_path: Path):
    coordinator, network = Coordinator(), shared()
    serving = coordinating(coordinator)
    address = network.wait(serving.__aenter__(), LIMIT_S, "a coordinator")
    try:
        with two_peers(tmp_path) as (giver, taker):
            attaching = attached(address, giver.service.servicer, 2)
            network.wait(attaching.__aenter__(), LIMIT_S, "an attachment")
            network.wait(coordinator.until_attached(2), LIMIT_S, "an attachment")
            giver.publish(5)
            giver.service.worker.address = ""
            offer = giver.offer(5, worker_id=2, metadata=hidden(giver.metadata()))
            with pytest.raises(PeerLost, match=r"127\.0\.0\.1:1"):
                taker.onboarding().take(offer).result(LIMIT_S)
            onboarding = taker.onboarding(coordinator=address, session=SESSION.format(0))
            assert same(onboarding.take(replace(offer, relayed=True)).result(LIMIT_S), 5)
            assert not taker.service.relays
            network.wait(attaching.__aexit__(None, None, None), LIMIT_S, "the end of an attachment")
    finally:
        network.wait(serving.__aexit__(None, None, None), LIMIT_S, "the end of a coordinator")


def test_a_damaged_state_is_refused(tmp_path: Path):
    with two_peers(tmp_path) as (giver, taker):
        giver.publish(5)
        spoil(giver)
        with pytest.raises(Checksum, match="the train state behind step 5 is damaged or a mixture"):
            taker.onboarding().take(giver.offer(5)).result(LIMIT_S)
        assert taker.state.published_steps == 0


def spoil(peer: StatePeer) -> None:
    """Changes a byte of the published state behind the owner's back."""
    worker = peer.service.worker

    async def write() -> None:
        block = as_ids([2])
        data = await worker.read(PLACE, block)
        data[0, 100] ^= 1
        await worker.write(PLACE, block, data)

    peer.network.wait(write(), LIMIT_S, "a spoiled block")


def test_a_peer_without_a_state_or_with_another_shape_of_blocks_is_refused(tmp_path: Path):
    with two_peers(tmp_path) as (giver, taker):
        with pytest.raises(UnknownLayout, match="worker ant has no train state"):
            taker.onboarding().take(giver.offer(5)).result(LIMIT_S)
        with pytest.raises(BadRequest, match="names neither"):
            taker.onboarding().take(giver.offer(5, metadata=None)).result(LIMIT_S)
        with state_peer(tmp_path / "c", config=StateConfig(block_bytes=2 * BLOCK_BYTES)) as other:
            other.publish(5)
            with pytest.raises(IncompatibleLayout, match=r"state\.block_bytes"):
                taker.onboarding().take(other.offer(5)).result(LIMIT_S)


def test_a_stored_state_is_loaded(tmp_path: Path):
    with state_peer(tmp_path) as giver, state_peer(tmp_path) as taker:
        giver.publish(5)
        store(giver, 5)
        offer = StateOffer(offer_id=1, completed_steps=5, run_id=RUN_ID)
        assert same(taker.onboarding().take(offer).result(LIMIT_S), 5)
        with pytest.raises(UnknownObject, match="no state behind step 6 of run handed is stored"):
            taker.onboarding().take(replace(offer, completed_steps=6)).result(LIMIT_S)


def store(peer: StatePeer, steps: int) -> None:
    worker = peer.service.worker

    async def put() -> None:
        await peer.state._blocks._open_store()
        (metadata,) = await worker.export_metadata()
        count = metadata.layouts[0].config.num_blocks
        keys = state_keys(RUN_ID, steps, range(count))
        report = await worker.put_blocks(PLACE, range(count), keys)
        assert all(outcome.is_success for outcome in report.outcomes)

    peer.network.wait(put(), LIMIT_S, "a stored state")


def test_a_peer_that_is_killed_in_the_middle_is_an_error_with_a_sentence(tmp_path: Path):
    with state_program(tmp_path / "a", 5, LARGE, "grpc") as giver, state_peer(tmp_path / "b") as taker:
        taking = taker.onboarding().take(giver.offer(5))
        wait_until(lambda: has_begun(taker), "the first bytes")
        giver.kill()
        with pytest.raises(PeerLost, match=r"blocks did not come from worker ant: lost rank 0"):
            taking.result(LIMIT_S)


def has_begun(peer: StatePeer) -> bool:
    """Says whether bytes have come."""
    entries = peer.service.worker._registry.entries()
    memory: Any = entries[0].memory if entries else None
    return memory is not None and bool(np.any(memory.buffers[0][: 1 << 20]))


def wait_until(condition: Callable[[], bool], what: str, limit: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        select.select([], [], [], 0.002)


def test_a_peer_that_stands_still_is_given_up_in_time(tmp_path: Path):
    with state_program(tmp_path / "a", 5, 1000, "grpc") as giver, state_peer(tmp_path / "b") as taker:
        offer = giver.offer(5)
        giver.stop()
        began = time.monotonic()
        with pytest.raises(Deadline, match="the state behind step 5 from worker ant did not come within 1 s"):
            taker.onboarding(within_s=1.0).take(offer).result(LIMIT_S)
        assert time.monotonic() - began < 5


def test_a_newer_offer_replaces_the_one_before(tmp_path: Path):
    with (
        state_program(tmp_path / "a", 5, 1000, "grpc") as lame,
        state_peer(tmp_path / "b") as giver,
        state_peer(tmp_path / "c") as taker,
    ):
        giver.publish(6)
        offer = lame.offer(5)
        lame.stop()
        onboarding = taker.onboarding()
        first = onboarding.take(offer)
        assert same(onboarding.take(giver.offer(6, offer_id=2)).result(LIMIT_S), 6)
        with pytest.raises(CancelledError):
            first.result(LIMIT_S)


def test_a_state_that_is_replaced_all_the_time_is_still_read_whole(tmp_path: Path):
    with two_peers(tmp_path, "shm", "grpc") as (giver, taker):
        giver.publish(1)
        stop = threading.Event()

        def publish() -> None:
            steps = 1
            while not stop.is_set():
                steps += 1
                giver.publish(steps)

        publishing = threading.Thread(target=publish)
        publishing.start()
        try:
            for _ in range(3):
                steps = giver.state.published_steps
                loaded = taker.onboarding().take(giver.offer(steps)).result(LIMIT_S)
                found = int(loaded[1]["completed_steps"])
                assert found >= steps
                assert same(loaded, found)
        finally:
            stop.set()
            publishing.join()


class Recorded:
    """What the coordinator and the training loop are told."""

    def __init__(self) -> None:
        self.failed: list[tuple[int, str]] = []
        self.damaged: list[int] = []
        self.published: list[int] = []
        self.arrived = threading.Event()

    def answers(self) -> Answers:
        return Answers(
            failed=self._fail,
            published=self.published.append,
            arrived=self.arrived.set,
        )

    def _fail(self, offer: int, why: str, is_damaged: bool) -> None:
        self.failed.append((offer, why))
        self.damaged += [offer] if is_damaged else []


def test_what_is_offered_is_handed_to_the_training_loop_once(tmp_path: Path):
    told = Recorded()
    with two_peers(tmp_path) as (giver, taker):
        states = OfferedStates(taker.onboarding(), told.answers())
        giver.publish(5)
        states.want(5)
        assert states.poll() is None
        states.offered(giver.offer(5))
        assert told.arrived.wait(LIMIT_S)
        state = states.poll()
        assert state is not None
        assert same((dict(state.tensors), dict(state.facts)), 5)
        assert state.completed_steps == 5
        assert told.published == [5]
        assert states.poll() is None
        states.reject("it does not fit")
        assert told.failed == [(1, "it does not fit")]


def test_an_offer_that_fails_or_is_too_old_is_said_to_have_failed(tmp_path: Path):
    told = Recorded()
    with two_peers(tmp_path) as (giver, taker):
        states = OfferedStates(taker.onboarding(), told.answers())
        giver.publish(5)
        states.want(6)
        states.offered(giver.offer(5))
        assert told.failed == [(1, "means are kept from step 6 on; an older state is of no use")]
        states.offered(giver.offer(7, offer_id=2))
        wait_until(lambda: len(told.failed) == 2, "the second failure")
        assert told.failed[1][0] == 2
        assert "the state behind step 7" in told.failed[1][1]
        assert states.poll() is None
        assert not told.arrived.is_set()
        # What has come is dropped when it is not new enough any more.
        states.want(5)
        states.offered(giver.offer(5, offer_id=3))
        assert told.arrived.wait(LIMIT_S)
        states.want(6)
        assert states.poll() is None


def test_a_stored_state_that_is_damaged_is_said_to_be_and_one_that_is_elsewhere_is_not(tmp_path: Path):
    told = Recorded()
    with state_peer(tmp_path) as peer:
        peer.publish(5)
        store(peer, 5)
        objects = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 512]
        assert objects
        for file in objects:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        states = OfferedStates(peer.onboarding(), told.answers())
        states.offered(StateOffer(offer_id=1, completed_steps=5, run_id=RUN_ID))
        wait_until(lambda: len(told.failed) == 1, "the first failure")
        states.offered(StateOffer(offer_id=2, completed_steps=6, run_id=RUN_ID))
        wait_until(lambda: len(told.failed) == 2, "the second failure")
    assert [offer for offer, _ in told.failed] == [1, 2]
    assert "can't be loaded" in told.failed[0][1]
    assert told.damaged == [1]
