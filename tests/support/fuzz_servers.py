"""Live servers that a fuzzer calls: what it may know of them, and what must stay as it is."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ayni.channels import open_sync_channel
from tests.support.fuzz_calls import Base, Ended, Methods

_BAD_LINES = re.compile(
    r"Traceback|Task was destroyed|never retrieved|was never awaited|ResourceWarning| ERROR asyncio|Fatal Python|"
    r"AssertionError|ERROR grpc"
)


class Target(Protocol):
    """A server that is fuzzed."""

    name: str
    channel: grpc.Channel
    hints: dict[str, list[Any]]

    @property
    def methods(self) -> Methods: ...

    @property
    def pid(self) -> int: ...

    @property
    def log(self) -> str:
        """All of what the server has logged so far."""

    def bases(self, method: MethodDescriptor) -> list[Base]:
        """Calls of a method that the server would take now."""

    def snapshot(self) -> dict[str, object]:
        """What no refused call may change, by name."""

    def may_change(self, ended: Ended) -> bool:
        """Whether a call that was refused so changes the state, as documented."""

    def close(self) -> None:
        """Ends the server."""

    def renew(self) -> bool:
        """Puts the server back into a state worth fuzzing; says whether there was anything to do."""

    def good_call(self) -> None:
        """Makes a call that has to be answered."""


def bad_line(log: str) -> str:
    """The first line that no request may lead to, with what follows it; empty when there is none."""
    found = _BAD_LINES.search(log)
    return log[max(0, found.start() - 300) : found.start() + 3_000] if found else ""


def check_health(address: str) -> None:
    with open_sync_channel(address, "") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def tree_listing(folder: Path) -> dict[str, int]:
    """Sizes of all files below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            found[str(path.relative_to(folder))] = path.stat().st_size
    return found
