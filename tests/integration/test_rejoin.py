"""An elastic worker that loses the coordinator, or its membership, and comes back."""

import asyncio
import logging
from functools import partial
from typing import Any

import pytest

from ayni.errors import (
    IdentityTaken,
    LeaseRevoked,
    StaleEpoch,
    StepVoided,
    WorldFull,
)
from ayni.step_values import Origin
from ayni.v1 import coordinator_pb2 as pb
from tests.support.echo_coordinator import (
    EchoCoordinator,
    accept_and_hang,
    breaking,
    lease,
)
from tests.support.elastic_client import (
    EXTRA,
    FIRST,
    begin,
    contribute,
    eventually,
    extra_lease,
    in_background,
    membership,
    report,
)
from tests.support.rejoin import asked, is_worker, raising, refuse_later_joins
from worker_agent import bridge
from worker_agent.session import Commit


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
