"""Connections of this process are found by their addresses, and shut down where they are asked for only."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from worker_agent import own_sockets

Pair = tuple[socket.socket, socket.socket, socket.socket]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def pair(stack: ExitStack) -> Pair:
    """Returns a listener, and both ends of a connection to it."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    dialled = stack.enter_context(socket.create_connection(listener.getsockname(), 5))
    accepted, _ = listener.accept()
    return listener, dialled, stack.enter_context(accepted)


def test_a_listener_is_found_as_long_as_it_listens(stack: ExitStack):
    listener, *_ = pair(stack)
    place = listener.getsockname()
    assert place in own_sockets.listening()
    listener.close()
    assert place not in own_sockets.listening()


def test_both_ends_are_shut_down_and_the_listener_goes_on(stack: ExitStack):
    listener, dialled, accepted = pair(stack)
    assert own_sockets.shut_down({listener.getsockname()}) == 2
    assert dialled.recv(1) == accepted.recv(1) == b""
    again = stack.enter_context(socket.create_connection(listener.getsockname(), 5))
    listener.accept()[0].close()
    assert again.recv(1) == b""


def test_other_connections_are_left_alone(stack: ExitStack):
    listener, *_ = pair(stack)
    _, dialled, accepted = pair(stack)
    own_sockets.shut_down({listener.getsockname(), ("127.0.0.2", dialled.getpeername()[1])})
    dialled.sendall(b"x")
    assert accepted.recv(1) == b"x"


def test_no_descriptor_is_left_behind(stack: ExitStack):
    listener, *_ = pair(stack)
    unix = socket.socketpair()
    for one in unix:
        stack.enter_context(one)
    before = len(list(own_sockets._DESCRIPTORS.iterdir()))
    own_sockets.shut_down({listener.getsockname()})
    own_sockets.listening()
    assert len(list(own_sockets._DESCRIPTORS.iterdir())) == before


def test_nothing_is_found_where_open_files_can_not_be_looked_through(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    listener, *_ = pair(stack)
    monkeypatch.setattr(own_sockets, "_DESCRIPTORS", tmp_path / "no such folder")
    assert own_sockets.listening() == set()
    assert own_sockets.shut_down({listener.getsockname()}) == 0
