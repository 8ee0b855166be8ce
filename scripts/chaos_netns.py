"""A network namespace for each worker, with a link that has delay, loss and a limited rate. Needs root and iproute2.

All namespaces hang on one bridge, on which the coordinator listens; the addresses are reached from this machine alone.
What the kernel lacks (netem is a module of its own) is left out, and said.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from scripts.chaos_fleet import ChaosFailed

_NETWORK = "10.203.77"
_USUAL = ("netem", "delay", "2ms", "1ms", "loss", "0.1%")
"""What every link has, all the time."""
_USUAL_WITHOUT_NETEM = ("tbf", "rate", "400mbit", "burst", "256kb", "latency", "50ms")
_WORSE = {
    "slow": ("tbf", "rate", "16mbit", "burst", "64kb", "latency", "200ms"),
    "delay": ("netem", "delay", "50ms", "10ms", "loss", "2%"),
}
_WORSE_WITHOUT_NETEM = {**_WORSE, "delay": ("tbf", "rate", "4mbit", "burst", "32kb", "latency", "400ms")}


@dataclass
class NamespaceWay:
    """The link of one namespace."""

    name: str
    device: str
    """This machine's end of the link."""
    address: str
    listen: str
    netem: bool
    whole: bool = True

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def disturb(self, mode: str) -> None:
        """Loses every packet ("cut" and "stall": a broken cable says nothing), or makes the link worse."""
        self.whole = False
        if mode in ("cut", "stall"):
            _ip("link", "set", self.device, "down")
        else:
            self._shape((_WORSE if self.netem else _WORSE_WITHOUT_NETEM)[mode])

    def mend(self) -> None:
        """Makes the link what it was."""
        _ip("link", "set", self.device, "up")
        self._shape(_USUAL if self.netem else _USUAL_WITHOUT_NETEM)
        self.whole = True

    def _shape(self, discipline: tuple[str, ...]) -> None:
        _run("tc", "qdisc", "replace", "dev", self.device, "root", *discipline)
        _ip("netns", "exec", self.name, "tc", "qdisc", "replace", "dev", "eth0", "root", *discipline)


class Namespaces:
    """Ways through namespaces; all are gone after `close`."""

    insecure = True
    host = f"{_NETWORK}.1"

    def __init__(self, say: Callable[[str], None]) -> None:
        if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
            raise ChaosFailed("--netns needs root, and the programs ip and tc (package iproute2)")
        self._label = f"ayni{os.getpid() % 100000}"
        self._ways: dict[str, NamespaceWay] = {}
        _ip("link", "add", self._label, "type", "bridge")
        _ip("address", "add", f"{self.host}/24", "dev", self._label)
        _ip("link", "set", self._label, "up")
        self._netem = _has_netem(self._label)
        if not self._netem:
            say("this kernel has no netem: links have a limited rate, but neither delay nor loss")

    async def add(self, name: str, port: int) -> NamespaceWay:
        """Makes a worker's namespace, or returns the one that it has."""
        if name not in self._ways:
            self._ways[name] = self._make(len(self._ways), port)
        return self._ways[name]

    async def close(self) -> None:
        for way in self._ways.values():
            _ip("netns", "delete", way.name)
        _ip("link", "delete", self._label)

    def _make(self, number: int, port: int) -> NamespaceWay:
        name, device, own = f"{self._label}-{number}", f"{self._label}v{number}", f"{_NETWORK}.{number + 10}"
        _ip("netns", "add", name)
        _ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", device, "master", self._label)
        inside = ("netns", "exec", name, "ip")
        _ip(*inside, "address", "add", f"{own}/24", "dev", "eth0")
        for each in ("lo", "eth0"):
            _ip(*inside, "link", "set", each, "up")
        way = NamespaceWay(name, device, f"{self.host}:{port}", f"{own}:0", self._netem)
        way.mend()
        return way


def _has_netem(device: str) -> bool:
    command = ("tc", "qdisc", "add", "dev", device, "root", *_USUAL)
    if subprocess.run(command, capture_output=True, timeout=20, check=False).returncode:
        return False
    _run("tc", "qdisc", "delete", "dev", device, "root")
    return True


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise ChaosFailed(f"{' '.join(command)}: {done.stderr.strip()}")
