"""An elastic worker that loses the coordinator, or its membership, and comes back."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from ayni.blocks.metadata import WorkerMetadata
from ayni.blocks.metadata_messages import metadata_message
from ayni.errors import (
    AyniError,
    Halted,
    IdentityRefused,
    IdentityTaken,
    Incompatible,
    LeaseRevoked,
    Quarantined,
    RunEnded,
    StaleEpoch,
    StepVoided,
    TokenRefused,
    UnknownWorker,
    WorldFull,
)
from ayni.step_values import Origin
from ayni.v1 import coordinator_pb2 as pb
from tests.support.echo_coordinator import (
    EchoCoordinator,
    accept_and_hang,
    breaking,
    hang,
    lease,
    serving,
    shutdown,
)
from tests.support.elastic_client import (
    EXTRA,
    FIRST,
    begin,
    connect,
    contribute,
    eventually,
    extra_lease,
    in_background,
    membership,
    report,
    tell,
)
from worker_agent import bridge
from worker_agent.assignment_frames import StateOffer
from worker_agent.client import WorkerClient
from worker_agent.faults import CoordinatorLost, Interrupted
from worker_agent.session import Commit, ShardAssignment, Woken

SHORT = timedelta(seconds=0.5)
PEER = metadata_message(
    WorkerMetadata(
        instance_id="7d444840-9dc0-41d1-b245-5ffdce74fad2",
        epoch=1,
        rank=0,
        owner_id=2,
        incarnation=5,
        address="127.0.0.1:50051",
        layouts=(),
        engines=(),
        parallelism=None,
        resources=(),
        mode=None,
    )
)


def raising(error: AyniError, calls: int = 1_000_000) -> Callable[[Any], Any]:
    """Refuses the first calls."""
    left = iter(range(calls))

    async def refuse(_: Any) -> None:
        if next(left, None) is not None:
            raise error

    return refuse


def refuse_later_joins(server: EchoCoordinator, error: AyniError, times: int = 1_000_000) -> None:
    """Refuses every Join after the first one, so many times."""
    server.on["Join"] = raising(error, times)


def asked(server: EchoCoordinator, client: WorkerClient, shard: ShardAssignment) -> "Future[Any]":
    """Has a commit asked for that gets no answer."""
    server.on["CommitStep"] = hang
    contribute(client, shard).result(20)
    waiting = in_background(lambda: client.commit(shard, report(shard)))
    before = server.calls["CommitStep"]
    eventually(lambda: server.calls["CommitStep"] > before or len(server.commits) > 0, "the commit")
    return waiting


def test_a_worker_that_lost_the_coordinator_is_another_member_and_takes_leases_again(caplog):
    caplog.set_level(logging.WARNING)
    server = EchoCoordinator()
    server.gradient = accept_and_hang
    with membership(server, completed_steps=3, parameters_sha256="ab" * 32) as client:
        shard = begin(server, client, step=3)
        future = contribute(client, shard)
        eventually(lambda: server.calls["Gradient"] == 1, "the contribution")
        server.say(None)
        with pytest.raises(StepVoided, match="step 3 attempt 0 was given up: the coordinator was lost"):
            future.result(20)
        again = begin(server, client, step=3, attempt=1)
        assert (again.step, again.attempt, client.worker_id) == (3, 1, 8)
        server.gradient = server.echo
        assert contribute(client, again).result(20)[0] == 0.25
        assert server.begins[-1].worker_id == 8
    names, nonces = {join.worker_name for join in server.joins}, {join.join_nonce for join in server.joins}
    assert (len(server.joins), names, len(nonces)) == (2, {"ant"}, 2)
    assert [(o.worker_id, o.completed_steps, o.parameters_sha256) for o in server.openings] == [
        (7, 3, "ab" * 32),
        (8, 3, "ab" * 32),
    ]
    lost, back = (record.message for record in caplog.records if record.name == "worker_agent.rejoining")
    assert "is gone (last heard of" in lost
    assert lost.endswith("it ended the assignment stream without a word; rejoining for up to 20 s")
    assert back.startswith("rejoined as worker 8 after 0.")


def test_work_of_a_lost_membership_is_void_at_once_and_a_lease_of_it_stays_void():
    server = EchoCoordinator()
    with membership(server) as client:
        shard = begin(server, client)
        refuse_later_joins(server, WorldFull("full", max_workers=1))
        server.say(None)
        eventually(lambda: server.calls["Join"] > 1, "a try to come back")
        for work in (lambda: contribute(client, shard).result(20), lambda: client.commit(shard, report(shard))):
            with pytest.raises(StepVoided, match="the coordinator was lost"):
                work()
        server.on.clear()
        eventually(lambda: client.worker_id == 8, "the return")
        with pytest.raises(StepVoided, match="not the lease that this worker took last"):
            client.commit(shard, report(shard))
    assert server.calls["CommitStep"] == 0


def test_a_commit_that_was_made_while_the_worker_was_away_is_returned_and_counts():
    server = EchoCoordinator()
    with membership(server, completed_steps=5) as client:
        shard = begin(server, client, step=5)
        waiting = asked(server, client, shard)
        del server.on["CommitStep"]
        server.say(None)
        commit = waiting.result(20)
        assert isinstance(commit, Commit)
        assert (commit.step, commit.global_loss) == (5, 0.5)
        eventually(lambda: len(server.openings) == 2, "the return")
        assert (server.openings[1].completed_steps, server.openings[1].parameters_sha256) == (6, "")
        assert begin(server, client, step=6).step == 6
    first, second = server.commits
    assert (first.worker_id, second.worker_id) == (7, 8)
    second.worker_id = 7
    assert first == second


def test_a_commit_that_was_not_made_while_the_worker_was_away_is_void():
    server = EchoCoordinator()
    with membership(server, completed_steps=5) as client:
        shard = begin(server, client, step=5)
        waiting = asked(server, client, shard)
        server.on["CommitStep"] = raising(StaleEpoch("epoch 1 is over", epoch=1, current_epoch=2))
        server.say(None)
        with pytest.raises(StepVoided, match="step 5 attempt 0 was given up: epoch 1 is over"):
            waiting.result(20)
        eventually(lambda: len(server.openings) == 2, "the return")
        assert server.openings[1].completed_steps == 5
        assert begin(server, client, step=5, attempt=1).attempt == 1


def test_a_coordinator_that_is_lost_again_before_it_answers_is_asked_once_more():
    server = EchoCoordinator()
    with membership(server) as client:
        waiting = asked(server, client, begin(server, client))
        server.on["CommitStep"] = breaking(2)
        server.say(None)
        assert isinstance(waiting.result(20), Commit)
    assert [commit.worker_id for commit in server.commits] == [7, 8, 8, 8]
    assert len({join.join_nonce for join in server.joins[1:]}) == 1


def test_an_extra_lease_ends_with_the_membership_and_the_first_one_is_asked_for():
    server = EchoCoordinator()
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        waiting = asked(server, client, shard)
        server.say(lease(**EXTRA))
        extra = extra_lease(waiting.result(20))
        server.gradient = accept_and_hang
        future = contribute(client, extra)
        waiting = in_background(lambda: client.commit(extra, report(extra)))
        eventually(lambda: server.calls["Gradient"] == 2, "the extra contribution")
        del server.on["CommitStep"]
        server.say(None)
        for each in (future, waiting):
            with pytest.raises(LeaseRevoked, match="the coordinator was lost"):
                each.result(20)
        eventually(lambda: client.worker_id == 8, "the return")
        assert isinstance(client.commit(shard, report(shard)), Commit)
    assert [(commit.worker_id, commit.lease_id) for commit in server.commits] == [(7, 1), (8, 1)]


@pytest.mark.parametrize(
    ("changes", "following", "expected"),
    [
        ({}, False, 1),
        ({}, True, 0),
        ({"kind": pb.STEP_KIND_EVALUATE}, False, 0),
    ],
    ids=["an update", "a mean that is kept", "an evaluation"],
)
def test_what_was_committed_before_the_loss_counts_as_it_should(
    changes: dict[str, Any], following: bool, expected: int
):
    server = EchoCoordinator()
    with membership(server) as client:
        shard = begin(server, client, **changes)
        client.commit(shard, report(shard, following=following))
        server.say(None)
        eventually(lambda: len(server.openings) == 2, "the return")
    assert server.openings[1].completed_steps == expected


def test_progress_that_the_loop_notes_travels_with_heartbeats_and_the_next_join():
    server = EchoCoordinator(heartbeat_seconds=5, lease_seconds=20)
    with membership(server) as client:
        eventually(lambda: len(server.heartbeats) == 1, "the first heartbeat")
        client.note_progress(40)
        client.caught_up(41, Origin(epoch=3, attempt=1))
        eventually(lambda: len(server.heartbeats) == 2, "a heartbeat at once")
        assert server.heartbeats[1].completed_steps == 41
        assert server.heartbeats[1].origin == pb.StateOrigin(epoch=3, attempt=1)
        server.say(None)
        eventually(lambda: len(server.openings) == 2, "the return")
    assert server.openings[1].completed_steps == 41
    assert server.openings[1].origin == pb.StateOrigin(epoch=3, attempt=1)


def test_a_place_that_the_lost_membership_still_holds_is_given_back_first():
    server = EchoCoordinator()

    async def hold(_: Any) -> None:
        if server.calls["Join"] > 1 and not server.leaves:
            raise IdentityTaken("worker name 'ant' belongs to live worker 7", worker_name="ant")

    sessions: list[str] = []

    async def note(context: Any) -> None:
        sessions.append(dict(context.invocation_metadata())["ayni-session"])

    server.on |= {"Join": hold, "Leave": note}
    with membership(server) as client:
        server.say(None)
        eventually(lambda: client.worker_id == 8, "the return")
        assert [(goodbye.worker_id, goodbye.reason) for goodbye in server.leaves] == [
            (7, "its connection was lost, and it is back")
        ]
    assert sessions == ["secret-7", "secret-8"]
    assert server.calls["Join"] == 3


@pytest.mark.parametrize(
    "passing",
    [IdentityTaken("held", worker_name="ant"), WorldFull("full", max_workers=1), UnknownWorker("gone", worker_id=7)],
    ids=lambda error: error.reason,
)
def test_refusals_that_pass_are_waited_out(passing: AyniError):
    server = EchoCoordinator()
    with membership(server) as client:
        refuse_later_joins(server, passing, times=3)
        server.say(None)
        assert begin(server, client).step == 0
        assert client.worker_id == 8


@pytest.mark.parametrize(
    "final",
    [
        RunEnded("the run is over"),
        Incompatible("another run", field="run_id"),
        Quarantined("shut out", worker_name="ant"),
        TokenRefused("another token"),
        Halted("halted", detail="nan"),
        IdentityRefused("another certificate"),
    ],
    ids=lambda error: error.reason,
)
def test_verdicts_on_the_worker_end_everything_at_once(final: AyniError):
    server = EchoCoordinator()
    with membership(server) as client:
        waiting = asked(server, client, begin(server, client))
        refuse_later_joins(server, final)
        server.say(None)
        for wait in (lambda: waiting.result(20), client.receive_shard, client.receive_shard):
            with pytest.raises(type(final)):
                wait()
    assert server.calls["Join"] == 2


def test_a_coordinator_that_stays_away_is_given_up_after_the_allowance():
    server = EchoCoordinator()
    with serving(server) as address:
        client = connect(address, rejoin_timeout=SHORT)
        shard = begin(server, client)
        waiting = asked(server, client, shard)
    words = r"could not come back within 0.5 s \(\d+ tries\): Join to the coordinator at .*; start it again when"
    for wait in (lambda: waiting.result(20), client.receive_shard, client.receive_shard):
        with pytest.raises(CoordinatorLost, match=words):
            wait()
    client.close()


def test_a_coordinator_that_comes_back_at_its_address_is_found_within_seconds():
    server = EchoCoordinator()
    with serving(server) as address:
        client = connect(address)
        shard = begin(server, client)
        future = contribute(client, shard)
    with pytest.raises(StepVoided):
        client.commit(shard, report(shard))
    assert future.done()
    # Long enough for the pauses between tries to have grown to their limit.
    time.sleep(2)
    later = EchoCoordinator()
    with serving(later, address):
        began = time.monotonic()
        eventually(lambda: len(later.openings) == 1, "the return")
        assert time.monotonic() - began < 2
        assert begin(later, client).step == 0
        client.close()
    assert later.calls["Leave"] == 1


@pytest.mark.parametrize("call", ["Heartbeat", "Gradient", "CommitStep"])
def test_a_membership_that_was_ended_is_lost_whichever_call_says_so(call: str):
    server = EchoCoordinator()
    with membership(server) as client:
        shard = begin(server, client)
        server.on[call] = raising(UnknownWorker("worker 7 is not a member: its lease ended", worker_id=7), calls=1)
        futures = [contribute(client, shard), in_background(lambda: client.commit(shard, report(shard)))]
        eventually(lambda: client.worker_id == 8, "the return")
        outcomes = [future.exception(20) for future in futures]
        assert all(outcome is None or isinstance(outcome, StepVoided) for outcome in outcomes)
        assert call != "CommitStep" or outcomes == [None, None]
        assert begin(server, client, step=1).step == 1
    assert server.calls["Join"] == 2


def test_a_coordinator_that_is_silent_for_a_lease_is_left_and_joined_again():
    server = EchoCoordinator(lease_seconds=0.3)
    server.on["Heartbeat"] = hang
    with membership(server) as client:
        eventually(lambda: server.calls["Join"] > 1, "a try to come back")
        del server.on["Heartbeat"]
        eventually(lambda: len(server.heartbeats) > 2, "heartbeats")
        assert begin(server, client).step == 0


def test_a_worker_that_is_not_elastic_does_not_come_back():
    server = EchoCoordinator()
    with membership(server, elastic=False) as client:
        server.say(None)
        with pytest.raises(CoordinatorLost, match="start this worker again when the coordinator is back"):
            client.receive_shard()
    assert server.calls["Join"] == 1


def test_an_interrupted_worker_does_not_come_back():
    server = EchoCoordinator()
    with membership(server) as client:
        refuse_later_joins(server, WorldFull("full", max_workers=1))
        server.say(None)
        waiting = in_background(client.receive_shard)
        eventually(lambda: server.calls["Join"] > 1, "a try to come back")
        client.interrupt("SIGTERM")
        with pytest.raises(Interrupted, match="SIGTERM"):
            waiting.result(20)
        tries = server.calls["Join"]
        client.close("interrupted (SIGTERM)")
    assert server.calls["Join"] == tries


def test_a_loop_that_waits_for_a_lease_can_be_woken_even_while_the_coordinator_is_away():
    server = EchoCoordinator()
    with membership(server) as client:
        waiting = in_background(client.receive_shard)
        client.wake()
        with pytest.raises(Woken):
            waiting.result(20)
        refuse_later_joins(server, WorldFull("full", max_workers=1))
        server.say(None)
        client.wake()
        with pytest.raises(Woken):
            client.receive_shard()
        server.on.clear()
        assert begin(server, client).step == 0


def test_a_lease_that_is_there_comes_before_a_wake():
    server = EchoCoordinator()
    with membership(server) as client:
        tell(server, client, lease(step=4))
        client.wake()
        shard = client.receive_shard()
        assert shard
        assert shard.step == 4
        with pytest.raises(Woken):
            client.receive_shard()


def test_offers_reach_the_callback_and_a_failed_one_is_told_once_and_at_once():
    server = EchoCoordinator(heartbeat_seconds=5, lease_seconds=20)
    offers: list[StateOffer] = []
    stored = pb.StateOffer(offer_id=3, completed_steps=12, stored=pb.StoredState(run_id="before"))
    peer = pb.PeerState(worker_id=2, worker_name="bee", relayed=True, metadata=PEER)
    with membership(server) as client:
        tell(server, client, pb.ShardAssignmentResponse(offer=stored))
        client.on_offer(offers.append)
        eventually(lambda: len(offers) == 1, "the offer that came before")
        live = pb.StateOffer(offer_id=4, completed_steps=14, peer=peer)
        tell(server, client, pb.ShardAssignmentResponse(offer=live))
        client.fail_offer(4, "worker bee went away", is_damaged=True)
        eventually(lambda: len(server.heartbeats) == 2, "a heartbeat at once")
        client.caught_up(14)
        eventually(lambda: len(server.heartbeats) == 3, "another one")
    assert offers[0] == StateOffer(offer_id=3, completed_steps=12, run_id="before")
    assert (offers[1].offer_id, offers[1].worker_id, offers[1].worker_name, offers[1].relayed) == (4, 2, "bee", True)
    assert offers[1].metadata
    assert offers[1].metadata.address == "127.0.0.1:50051"
    said = [(h.failed_offer_id, h.failed_offer_reason, h.offered_state_is_damaged) for h in server.heartbeats]
    assert said == [(0, "", False), (4, "worker bee went away", True), (0, "", False)]


def test_an_offer_that_makes_no_sense_ends_nothing_but_itself():
    server = EchoCoordinator()
    with membership(server) as client:
        broken = pb.StateOffer(offer_id=4, completed_steps=14, peer=pb.PeerState(worker_name="bee"))
        server.say(pb.ShardAssignmentResponse(offer=broken))
        eventually(lambda: any(h.failed_offer_id == 4 for h in server.heartbeats), "the failed offer")
        assert begin(server, client).step == 0
    assert server.calls["Join"] == 1


def test_a_state_that_was_published_stays_published_and_is_waited_for_across_a_loss():
    server = EchoCoordinator()
    with membership(server) as client:
        client.publish(8)
        waiting = in_background(lambda: client.wait_settled(8, timedelta(seconds=20)))
        eventually(lambda: any(beat.published_steps == 8 for beat in server.heartbeats), "the publication")
        server.say(None)
        eventually(lambda: server.heartbeats[-1].worker_id == 8, "the return")
        assert server.heartbeats[-1].published_steps == 8
        assert not waiting.done()
        server.stored_steps = 8
        waiting.result(20)
        assert client.settled_steps == 8


def test_each_membership_is_told_to_whoever_asked():
    server = EchoCoordinator()
    seen: list[int] = []
    with membership(server) as client:
        client.on_member(lambda member: seen.append(member.membership.worker_id))
        eventually(lambda: seen == [7], "the first")
        server.say(None)
        eventually(lambda: seen == [7, 8], "the second")
        assert client.session == "secret-8"


def test_a_run_that_is_over_is_not_joined_again_when_the_coordinator_goes():
    server = EchoCoordinator()
    with serving(server) as address:
        client = connect(address)
        server.say(shutdown())
        assert client.receive_shard() is None
    assert client.receive_shard() is None
    assert client.finished
    client.close()
    assert server.calls["Join"] == 1


def is_worker(client: WorkerClient, number: int) -> bool:
    return client.worker_id == number


def test_coming_back_leaves_nothing_behind():
    async def count() -> int:
        return len(asyncio.all_tasks())

    def tasks() -> int:
        return bridge.shared().wait(count(), 20, "a count")

    server = EchoCoordinator()
    with membership(server) as client:
        begin(server, client)
        before = tasks()
        for number in range(8, 18):
            server.say(None)
            eventually(partial(is_worker, client, number), "the return")
        # A heartbeat that is under way is a few tasks; ten memberships would be many more.
        eventually(lambda: tasks() <= before + 5, f"about {before} tasks")
