"""The store of a torch group: who listens where, what is counted, and how waits in it end."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from ayni.errors import PeerLost
from ayni.settings import SettingsError
from tests.support.torch_members import Member
from worker_agent import own_sockets
from worker_agent.client_config import ClientConfig
from worker_agent.standing import Standing
from worker_agent.taking_part import take_part
from worker_agent.torch_store import LeaseCount, RendezvousStore, StoreClients, dialable
from worker_agent.torch_sums import Tally

ATTEMPT = (1, 7, 0)


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    opened = RendezvousStore("127.0.0.1")
    yield opened
    opened.close()


def count(store: RendezvousStore, prefix: str = "1-secret") -> LeaseCount:
    return LeaseCount(StoreClients(store.address), prefix)


def test_it_listens_at_the_one_address_that_it_says(store: RendezvousStore):
    host, _, port = store.address.rpartition(":")
    assert (host, int(port)) in own_sockets.listening()
    assert ("0.0.0.0", int(port)) not in own_sockets.listening()


def test_nobody_listens_once_it_is_closed():
    opened = RendezvousStore("127.0.0.1")
    host, _, port = opened.address.rpartition(":")
    opened.close()
    assert (host, int(port)) not in own_sockets.listening()


def test_a_wildcard_is_dialled_by_the_name_of_this_host():
    assert dialable("127.0.0.1") == "127.0.0.1"
    assert dialable("0.0.0.0") == dialable("::") != "0.0.0.0"


def test_the_weight_is_known_when_the_leases_cover_the_step(store: RendezvousStore):
    ant, bee = count(store), count(store)
    ant.add(ATTEMPT, Tally(count=3, weight=1 << 35), 4)
    bee.add(ATTEMPT, Tally(count=1, weight=5), 4)
    assert ant.total_weight(ATTEMPT, 5.0) == (1 << 35) + 5


def test_attempts_and_groups_are_counted_apart(store: RendezvousStore):
    one = count(store)
    for group, attempt in ((one, ATTEMPT), (one, (1, 8, 0)), (count(store, "2-other"), ATTEMPT)):
        group.add(attempt, Tally(count=2, weight=attempt[1]), 2)
        assert group.total_weight(attempt, 5.0) == attempt[1]


def test_a_wait_is_over_when_it_is_in_vain(store: RendezvousStore):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timeout after 1000ms"):
        count(store).total_weight(ATTEMPT, 1.0)
    assert 0.9 < time.monotonic() - began < 5


def waiting(work: Callable[[], object]) -> "Future[Exception]":
    """Does something on a thread that fails; returns how."""
    failed: Future[Exception] = Future()

    def wait() -> None:
        try:
            work()
        except RuntimeError as error:
            failed.set_result(error)

    threading.Thread(target=wait, daemon=True).start()
    return failed


def test_all_that_waits_in_a_store_ends_when_its_connections_are_closed(store: RendezvousStore):
    clients, others = StoreClients(store.address), StoreClients(store.address)
    clients.below("1-secret", "waiting")
    failed = waiting(lambda: LeaseCount(clients, "1-secret").total_weight(ATTEMPT, 60.0))
    others.below("1-secret", "counting").set("key", "value")
    clients.close()
    assert failed.result(5)
    with pytest.raises(RuntimeError, match=r"the connections to the store at .* were closed"):
        clients.below("1-secret", "waiting")
    assert others.below("1-secret", "counting").get("key") == b"value"


def test_a_store_that_does_not_answer_is_waited_for_until_its_connections_are_closed():
    member = Member.start(0, 60.0)
    try:
        clients = StoreClients(member.ready().store)
        one = LeaseCount(clients, "1-secret")
        one.add(ATTEMPT, Tally(count=1, weight=1), 4)
        member.stop()
        failed = waiting(lambda: one.add(ATTEMPT, Tally(count=1, weight=1), 4))
        with pytest.raises(TimeoutError):
            failed.result(1)
        clients.close()
        assert failed.result(5)
    finally:
        member.kill()


@pytest.fixture
def mute() -> Iterator[str]:
    """Address of one that listens and never answers, as a process that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_dialling_a_store_that_is_stopped_ends_when_its_connections_are_closed(mute: str, store: RendezvousStore):
    clients = StoreClients(mute)
    failed = waiting(lambda: clients.below("1-secret", "counting"))
    while not own_sockets.dialled(int(mute.rpartition(":")[2])):
        assert not failed.done()
    # Nobody who dials another store meanwhile waits for it.
    count(store).add(ATTEMPT, Tally(count=1, weight=1), 4)
    clients.close()
    assert failed.result(4.5)


def test_dialling_a_store_that_is_stopped_has_a_time_of_its_own(mute: str):
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        StoreClients(mute).below("1-secret", "counting")
    assert 4 < time.monotonic() - began < 20


def test_more_leases_than_the_step_has_are_found(store: RendezvousStore):
    one = count(store)
    one.add(ATTEMPT, Tally(count=3, weight=3), 4)
    with pytest.raises(PeerLost, match="leases on 5 micro-batches of step 7, which has 4"):
        one.add(ATTEMPT, Tally(count=2, weight=3), 4)


def test_a_store_that_is_gone_is_an_error_and_no_wait():
    opened = RendezvousStore("127.0.0.1")
    one = count(opened)
    one.add(ATTEMPT, Tally(count=1, weight=1), 2)
    opened.close()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        one.add(ATTEMPT, Tally(count=1, weight=1), 2)
    assert time.monotonic() - began < 5


def test_a_store_that_is_gone_is_not_dialled_for_long():
    opened = RendezvousStore("127.0.0.1")
    opened.close()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"nobody listens at {opened.address}, where the group's store should be"):
        count(opened).add(ATTEMPT, Tally(count=1, weight=1), 2)
    assert time.monotonic() - began < 2


def test_keys_of_an_ended_group_are_forgotten_and_no_others(store: RendezvousStore):
    clients = StoreClients(store.address)
    for prefix in ("1-secret", "11-secret", "2-other"):
        clients.below(prefix, "any").set("key", "value")
    store.forget("1-secret")
    assert not clients.below("1-secret", "any").check(["key"])
    assert clients.below("11-secret", "any").check(["key"])
    assert clients.below("2-other", "any").check(["key"])


def test_what_others_could_read_needs_a_word():
    config = ClientConfig(coordinator="127.0.0.1:1", token="t", elastic=True, store_listen="0.0.0.0")
    with pytest.raises(
        SettingsError, match=r"topology torch sends gradients in clear, and listening at 0\.0\.0\.0 shows"
    ):
        asyncio.run(take_part(config, Standing(), None, "cpu"))


def test_a_worker_without_a_store_takes_no_part():
    standing = Standing()
    asyncio.run(take_part(ClientConfig(coordinator="127.0.0.1:1", token="t", elastic=True), standing, None, "cpu"))
    assert standing.peers.topologies == ("sharded",)
    assert standing.peers.store_address == ""
