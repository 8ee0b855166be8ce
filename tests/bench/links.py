"""Places with a link of their own: network namespaces on one bridge, each limited in both directions.

Needs root and iproute2. Addresses are reached from this machine alone, and all is gone afterwards.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.processes import BenchFailed

_NETWORK = "10.203.78"
_DEVICE = "eth0"
_BURST_BYTES = 256 << 10
_LATENCY_MS = 50


@dataclass(frozen=True, kw_only=True)
class Place:
    """One namespace."""

    name: str
    address: str
    device: str = _DEVICE

    @property
    def prefix(self) -> tuple[str, ...]:
        """Runs a command there."""
        return ("ip", "netns", "exec", self.name)


@contextlib.contextmanager
def places(count: int, rate_mbit: float) -> Iterator[list[Place]]:
    """Makes namespaces whose links carry so many megabits a second, each way.

    Raises:
        BenchFailed: this machine can't have any.
    """
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise BenchFailed("shaped links need root, and the programs ip and tc (package iproute2)")
    label = f"bench{os.getpid() % 100000}"
    with contextlib.ExitStack() as stack:
        _run("ip", "link", "add", label, "type", "bridge")
        stack.callback(_run, "ip", "link", "delete", label)
        _run("ip", "address", "add", f"{_NETWORK}.1/24", "dev", label)
        _run("ip", "link", "set", label, "up")
        yield [_make(stack, label, number, rate_mbit) for number in range(count)]


def _make(stack: contextlib.ExitStack, bridge: str, number: int, rate_mbit: float) -> Place:
    place = Place(name=f"{bridge}-{number}", address=f"{_NETWORK}.{number + 10}")
    outside = f"{bridge}v{number}"
    _run("ip", "netns", "add", place.name)
    stack.callback(_run, "ip", "netns", "delete", place.name)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", _DEVICE, "netns", place.name)
    _run("ip", "link", "set", outside, "master", bridge)
    _run("ip", "link", "set", outside, "up")
    inside = (*place.prefix, "ip")
    _run(*inside, "address", "add", f"{place.address}/24", "dev", _DEVICE)
    for device in ("lo", _DEVICE):
        _run(*inside, "link", "set", device, "up")
    shape = ("root", "tbf", "rate", f"{rate_mbit:g}mbit", "burst", str(_BURST_BYTES), "latency", f"{_LATENCY_MS}ms")
    _run("tc", "qdisc", "replace", "dev", outside, *shape)
    _run(*place.prefix, "tc", "qdisc", "replace", "dev", _DEVICE, *shape)
    return place


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise BenchFailed(f"{' '.join(command)}: {done.stderr.strip()}")
