"""An elastic worker: wakes, offers and states across the loss of a membership."""

from datetime import timedelta

import pytest

from ayni.errors import (
    WorldFull,
)
from ayni.v1 import coordinator_pb2 as pb
from tests.support.echo_coordinator import (
    EchoCoordinator,
    lease,
)
from tests.support.elastic_client import (
    begin,
    eventually,
    in_background,
    membership,
    tell,
)
from tests.support.rejoin import PEER, refuse_later_joins
from worker_agent.assignment_frames import StateOffer
from worker_agent.session import Woken


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
