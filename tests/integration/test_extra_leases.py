"""Leases in addition to the first one of an attempt: handed out by commit, worked on, taken back."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from ayni.errors import LeaseRevoked, StaleStep, StepVoided
from ayni.v1 import coordinator_pb2 as pb
from tests.support.echo_coordinator import EchoCoordinator, accept_and_hang, lease, revoked
from tests.support.elastic_client import (
    EXTRA,
    FIRST,
    ONES,
    begin,
    contribute,
    eventually,
    extra_lease,
    in_background,
    membership,
    report,
    tell,
)
from worker_agent import bridge
from worker_agent.session import Commit


class Answers:
    """Holds back the answer to CommitStep until it is told."""

    def __init__(self, server: EchoCoordinator) -> None:
        self._may = asyncio.Event()
        server.on["CommitStep"] = self._wait

    def give(self) -> None:
        bridge.shared().call_soon(self._may.set)

    async def _wait(self, _: Any) -> None:
        await self._may.wait()


async def complete_only(context: Any) -> None:
    """What an extra lease's stream gets: no mean."""
    await EchoCoordinator().echo(context, sends_mean=False)


def test_commit_hands_out_an_extra_lease_while_it_waits_and_the_first_call_goes_on():
    server = EchoCoordinator()
    answers = Answers(server)
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        contribute(client, shard)
        waiting = in_background(lambda: client.commit(shard, report(shard)))
        eventually(lambda: server.calls["CommitStep"] == 1, "the commit of the first lease")
        server.gradient = complete_only
        server.say(lease(**EXTRA))
        extra = extra_lease(waiting.result(20))
        assert (extra.lease_id, extra.microbatches) == (99, range(1, 2))
        untouched = np.full_like(ONES, 7)
        assert contribute(client, extra, out=untouched).result(20) is untouched
        assert np.all(untouched == 7)
        waiting = in_background(lambda: client.commit(extra, report(extra)))
        eventually(lambda: server.calls["CommitStep"] == 2, "the commit of the extra lease")
        answers.give()
        commit = waiting.result(20)
        assert isinstance(commit, Commit)
        assert (commit.step, commit.total_weight) == (0, 4)
    assert [(c.lease_id, [m.microbatch for m in c.microbatches]) for c in server.commits] == [(1, [0]), (99, [1])]


def test_extra_leases_that_came_before_the_commit_are_handed_out_one_after_the_other():
    server = EchoCoordinator()
    answers = Answers(server)
    with membership(server) as client:
        shard = begin(server, client, num_microbatches=3)
        for number in (1, 2):
            changes = {"microbatch_start": number, "microbatch_stop": number + 1, "num_microbatches": 3}
            tell(server, client, lease(**{**EXTRA, **changes, "lease_id": 90 + number}))
        contribute(client, shard)
        first = extra_lease(client.commit(shard, report(shard)))
        second = extra_lease(client.commit(first, report(first)))
        assert (first.lease_id, second.lease_id) == (91, 92)
        waiting = in_background(lambda: client.commit(second, report(second)))
        eventually(lambda: len(server.commits) == 3, "the last commit is asked for")
        answers.give()
        assert isinstance(waiting.result(10), Commit)
    assert sorted(commit.lease_id for commit in server.commits) == [1, 91, 92]


def test_an_extra_lease_comes_even_where_the_first_one_can_not_be_complete_without_it():
    server = EchoCoordinator()
    server.gradient = accept_and_hang
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        contribute(client, shard)
        waiting = in_background(lambda: client.commit(shard, report(shard)))
        eventually(lambda: server.calls["Gradient"] == 1, "the contribution")
        server.say(lease(**EXTRA))
        extra_lease(waiting.result(20))
        assert server.calls["CommitStep"] == 0


def test_an_extra_lease_that_is_taken_back_ends_alone():
    server = EchoCoordinator()
    answers = Answers(server)
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        contribute(client, shard).result(20)
        server.say(lease(**EXTRA))
        extra = extra_lease(client.commit(shard, report(shard)))
        server.gradient = accept_and_hang
        future = contribute(client, extra)
        waiting = in_background(lambda: client.commit(extra, report(extra)))
        eventually(lambda: server.calls["Gradient"] == 2, "the extra contribution")
        server.say(revoked(99))
        with pytest.raises(LeaseRevoked, match="micro-batches 1 to 1 of step 0 is over: another worker was faster"):
            waiting.result(20)
        with pytest.raises(LeaseRevoked):
            future.result(20)
        with pytest.raises(LeaseRevoked):
            contribute(client, extra).result(20)
        waiting = in_background(lambda: client.commit(shard, report(shard)))
        answers.give()
        assert isinstance(waiting.result(20), Commit)
    assert server.calls["CommitStep"] == 1


def test_an_extra_lease_that_is_taken_back_before_it_was_handed_out_never_is():
    server = EchoCoordinator()
    answers = Answers(server)
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        tell(server, client, lease(**EXTRA), revoked(99))
        contribute(client, shard)
        waiting = in_background(lambda: client.commit(shard, report(shard)))
        eventually(lambda: server.calls["CommitStep"] == 1, "the commit")
        answers.give()
        assert isinstance(waiting.result(20), Commit)


def test_a_step_that_is_committed_meanwhile_is_the_answer_to_the_extra_lease():
    server = EchoCoordinator()
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        contribute(client, shard).result(20)
        answers = Answers(server)
        server.say(lease(**EXTRA))
        extra = extra_lease(client.commit(shard, report(shard)))
        eventually(lambda: server.calls["CommitStep"] == 1, "the first lease's commit")
        server.gradient = accept_and_hang
        future = contribute(client, extra)
        eventually(lambda: server.calls["Gradient"] == 2, "the extra contribution")
        answers.give()
        assert isinstance(client.commit(extra, report(extra)), Commit)
        # Its parts may be written to from now on.
        assert future.done()
        with pytest.raises(LeaseRevoked, match="the attempt is over"):
            future.result()


def test_an_extra_lease_that_came_too_late_does_not_void_the_first():
    async def refuse(_: Any) -> None:
        if server.calls["Gradient"] > 1:
            raise StaleStep("step 0 attempt 0 is not open", step=0)

    server = EchoCoordinator()
    server.on["Gradient"] = refuse
    answers = Answers(server)
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        contribute(client, shard).result(20)
        server.say(lease(**EXTRA))
        extra = extra_lease(client.commit(shard, report(shard)))
        with pytest.raises(LeaseRevoked, match="is not open"):
            contribute(client, extra).result(20)
        with pytest.raises(LeaseRevoked):
            client.commit(extra, report(extra))
        answers.give()
        assert isinstance(client.commit(shard, report(shard)), Commit)


def test_a_worker_that_is_left_behind_drops_the_step_and_takes_what_comes():
    server = EchoCoordinator()
    server.gradient = accept_and_hang
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        future = contribute(client, shard)
        waiting = in_background(lambda: client.commit(shard, report(shard)))
        eventually(lambda: server.calls["Gradient"] == 1, "the contribution")
        server.say(revoked(1, "it stood still"))
        for each in (future, waiting):
            with pytest.raises(StepVoided, match="the others went on without this worker: it stood still"):
                each.result(20)
        with pytest.raises(StepVoided, match="went on without this worker"):
            contribute(client, shard).result(20)
        follower = begin(server, client, step=1, microbatch_stop=0)
        assert (follower.step, len(follower.microbatches)) == (1, 0)


def test_a_first_lease_that_is_taken_back_before_it_was_taken_is_not_handed_out():
    server = EchoCoordinator()
    with membership(server) as client:
        tell(server, client, lease(), lease(**EXTRA), revoked(1))
        assert not client._has_news()
        server.say(lease(step=1))
        shard = client.receive_shard()
        assert shard
        assert shard.step == 1


def test_the_next_attempt_makes_extra_leases_of_the_last_void():
    server = EchoCoordinator()
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        server.say(lease(**EXTRA))
        again = begin(server, client, attempt=1, **FIRST)
        assert again.attempt == 1
        with pytest.raises(StepVoided, match="not the lease that this worker took last"):
            client.commit(shard, report(shard))
        contribute(client, again)
        assert isinstance(client.commit(again, report(again)), Commit)


def test_a_lost_answer_to_the_first_lease_is_asked_for_again_while_the_extra_one_is_worked_on():
    async def lose_one(context: Any) -> None:
        if server.calls["CommitStep"] == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    server = EchoCoordinator()
    server.on["CommitStep"] = lose_one
    with membership(server) as client:
        shard = begin(server, client, **FIRST)
        contribute(client, shard).result(20)
        tell(server, client, lease(**EXTRA))
        outcome = client.commit(shard, report(shard))
        if not isinstance(outcome, Commit):
            eventually(lambda: server.calls["CommitStep"] == 2, "the second try")
            assert isinstance(client.commit(outcome, report(outcome)), Commit)
    assert server.commits[0] == server.commits[1]


def test_what_a_report_says_travels():
    server = EchoCoordinator()
    with membership(server, max_microbatches=3, memory_bytes=1 << 33, num_buckets=5) as client:
        shard = begin(server, client, publish_state=True, **FIRST)
        assert shard.publish_state
        contribute(client, shard)
        client.commit(shard, report(shard, following=True, square_sum=2.5))
    join, commit = server.joins[0], server.commits[0]
    assert (join.elastic, join.max_microbatches, join.memory_bytes) == (True, 3, 1 << 33)
    assert (commit.following, commit.square_sum, commit.kind) == (True, 2.5, pb.STEP_KIND_TRAIN)
    assert [begun.num_buckets for begun in server.begins] == [5]


def test_the_simple_calls_are_refused_to_an_elastic_client():
    server = EchoCoordinator()
    with membership(server) as client:
        shard = begin(server, client)
        with pytest.raises(RuntimeError, match=r"use contribute\(\) and commit\(\), or join with"):
            client.send_gradients(shard.step, ONES, 0.0, 0, 4)
