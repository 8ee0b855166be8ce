"""An elastic worker that comes back: refusals that pass, those that do not, and when it gives up."""

import time

import pytest

from ayni.errors import (
    AyniError,
    Halted,
    IdentityRefused,
    IdentityTaken,
    Incompatible,
    Quarantined,
    RunEnded,
    StepVoided,
    TokenRefused,
    UnknownWorker,
    WorldFull,
)
from tests.support.echo_coordinator import (
    EchoCoordinator,
    hang,
    serving,
    shutdown,
)
from tests.support.elastic_client import (
    begin,
    connect,
    contribute,
    eventually,
    in_background,
    membership,
    report,
)
from tests.support.rejoin import SHORT, asked, raising, refuse_later_joins
from worker_agent.faults import CoordinatorLost, Interrupted


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
