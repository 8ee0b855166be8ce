"""Where the members of a torch group find one another, and count the leases that they have begun.  [shell]

Every worker opens a store when the run's topology is "torch", and says where; a group uses the one of its lowest rank.
All keys of a group begin with its generation and its secret, so that who was not told the secret finds nothing. The
store itself asks nobody who he is: it belongs on a network whose machines trust one another.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from ayni.endpoints import Address, parse_address
from ayni.errors import PeerLost
from worker_agent import own_sockets
from worker_agent.own_sockets import Place
from worker_agent.torch_sums import AttemptKey, Tally, unpacked

ANSWER_S = 15.0
"""Longest time that a store may take to answer."""
_CONNECT_S, _DIAL_S, _AGAIN_S = 2.0, 5.0, 0.1

_DIALLING = threading.Condition()
_DIALLED: set[int] = set()
"""Ports that somebody dials now: one at a time each, so that no other connection is taken for the new one."""


class RendezvousStore:
    """A store that this process serves, for the groups in which it has the lowest rank."""

    def __init__(self, listen: str, dialled: str = "") -> None:
        """Listens.

        Args:
            listen: host to listen at; no other of the machine's addresses leads to the store.
            dialled: host that others dial; empty: the same.

        Raises:
            OSError: the host is not this machine's.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with socket.create_server((listen, 0)) as server:
            port = server.getsockname()[1]
            self._store: Any = TCPStore(
                listen,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=ANSWER_S),
                master_listen_fd=server.detach(),
            )
        self.address = str(Address(host=dialled or listen, port=port))
        """Where it is dialled, host:port."""

    def forget(self, prefix: str) -> None:
        """Drops all keys of an ended group."""
        if not hasattr(self._store, "list_keys"):
            return
        for key in self._store.list_keys():
            if prefix in key.split("/"):
                self._store.delete_key(key)

    def close(self) -> None:
        """Stops listening; who still waits in it is let go of with an error."""
        self._store = None


def dialable(host: str) -> str:
    """Returns the host that others dial: a wildcard means this one."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


class StoreClients:
    """Connections to one store, one for each purpose: who waits in one holds up nobody in another."""

    def __init__(self, address: str) -> None:
        """Takes where the store is. Nothing is dialled yet."""
        self.address = address
        self._lock = threading.Condition()
        self._made: dict[str, Any] = {}
        self._ends: set[Place] = set()
        """Own ends of the connections."""
        self._is_closed = False

    def below(self, prefix: str, purpose: str) -> Any:
        """Returns a store whose keys all begin with `prefix`. The first time it blocks until there is a connection.

        Raises:
            RuntimeError: nobody answers, or the connections were closed.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        made = self._made.get(purpose) or self._dial()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"the connections to the store at {self.address} were closed")
            return PrefixStore(prefix, self._made.setdefault(purpose, made))

    def close(self) -> None:
        """Ends all that waits in the store, without a wait: a call to one that is stopped has no time of its own."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        own_sockets.shut_down(self._ends)

    def _dial(self) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        parsed = parse_address(self.address)
        _check_listening(parsed)
        with _alone(parsed.port), self._ended_in_time(parsed.port):
            made = TCPStore(parsed.host, parsed.port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
        made.set_timeout(timedelta(seconds=ANSWER_S))
        return made

    @contextlib.contextmanager
    def _ended_in_time(self, port: int) -> Iterator[None]:
        """Ends the connection that is being made once its time is up, or all are closed.

        torch waits for the first answer of a store without end, and a process that is stopped still listens.
        """
        before, over = own_sockets.dialled(port), threading.Event()
        watch = threading.Thread(target=self._watch, args=(port, before, over), name="ayni-torch-dial", daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            with self._lock:
                self._ends |= own_sockets.dialled(port) - before
                self._lock.notify_all()
            watch.join()

    def _watch(self, port: int, before: set[Place], over: threading.Event) -> None:
        """Shuts down what is dialled anew, again and again: torch dials again until its own time is up."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_closed or over.is_set(), _DIAL_S)
            while not over.is_set():
                own_sockets.shut_down(own_sockets.dialled(port) - before)
                self._lock.wait_for(over.is_set, _AGAIN_S)


@contextlib.contextmanager
def _alone(port: int) -> Iterator[None]:
    """Waits until nobody else dials a port.

    Raises:
        RuntimeError: somebody does for too long.
    """
    with _DIALLING:
        if not _DIALLING.wait_for(lambda: port not in _DIALLED, ANSWER_S):
            raise RuntimeError(f"another connection to port {port} has been dialled for {ANSWER_S:g} s")
        _DIALLED.add(port)
    try:
        yield
    finally:
        with _DIALLING:
            _DIALLED.discard(port)
            _DIALLING.notify_all()


def _check_listening(address: Address) -> None:
    """Confirms that somebody listens; torch would try again and again, although a store that is gone stays so.

    Raises:
        RuntimeError: nobody does.
    """
    try:
        socket.create_connection((address.host, address.port), ANSWER_S).close()
    except OSError as error:
        raise RuntimeError(f"nobody listens at {address}, where the group's store should be: {error}") from None


class LeaseCount:
    """Counts what the members of a group have begun to work on in an attempt. Every call blocks."""

    def __init__(self, clients: StoreClients, prefix: str) -> None:
        """Takes what connects to the group's store, and what the group's keys begin with."""
        self._clients = clients
        self._prefix = prefix
        self._last: AttemptKey | None = None
        """Attempt that was waited for last."""

    def add(self, attempt: AttemptKey, tally: Tally, num_microbatches: int) -> None:
        """Counts a lease once. Whoever counts the last one says what all of them weigh.

        Raises:
            RuntimeError: the store is gone.
            PeerLost: more was counted than the step has: somebody counted for a lease that has ended.
        """
        store = self._clients.below(self._prefix, "counting")
        total = unpacked(store.add(_name(attempt, "leased"), tally.packed()))
        if total.count > num_microbatches:
            raise PeerLost(
                f"the group's members have leases on {total.count} micro-batches of step {attempt[1]}, which has "
                f"{num_microbatches}; the coordinator makes a new group",
                peer=self._clients.address,
                detail="too many leases",
            )
        if total.count == num_microbatches:
            store.set(_name(attempt, "weight"), str(total.weight))

    def total_weight(self, attempt: AttemptKey, seconds: float) -> int:
        """Waits until the leases cover the step; returns what all micro-batches weigh. For the lowest rank.

        Args:
            attempt: which one.
            seconds: longest wait.

        Raises:
            RuntimeError: the store is gone, its connections were closed, or the wait was in vain.
        """
        store, name = self._clients.below(self._prefix, "waiting"), _name(attempt, "weight")
        store.wait([name], timedelta(seconds=seconds))
        self._forget_last(store, attempt)
        return int(store.get(name))

    def _forget_last(self, store: Any, attempt: AttemptKey) -> None:
        """Drops what was counted in the attempt before: all members have begun this one."""
        last, self._last = self._last, attempt
        for what in ("leased", "weight") if last else ():
            assert last
            store.delete_key(_name(last, what))


def _name(attempt: AttemptKey, what: str) -> str:
    return "/".join(["attempt", *map(str, attempt), what])
