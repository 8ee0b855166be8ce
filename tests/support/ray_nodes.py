"""A Ray cluster of several nodes on this host, each with a loopback address of its own."""

import contextlib
import importlib.util
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.launching import PYTHON, Place, free_port, start

NODE = "AYNI_TEST_NODE"
STARTED = "Ray runtime started"
HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "4",
}
"""A node that died is given up after 4 s instead of 15; one that is slow has more time to answer."""


@dataclass
class RayNodes:
    """A cluster; `environment` is what every process of it, and the driver, needs."""

    where: Place
    address: str
    environment: dict[str, str]
    stack: contextlib.ExitStack = field(repr=False)

    def add(self, name: str, address: str, cpus: int, *flags: str) -> None:
        """Starts a node; it is there when `wait_for_nodes` has counted it."""
        log = self.where.folder / f"ray-{name}.log"
        command = [PYTHON, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={address}"]
        command += [f"--num-cpus={cpus}", "--object-store-memory=80000000", "--disable-usage-stats", *flags]
        self.stack.enter_context(start(self.where, log, *command, **self.environment, **{NODE: name}))

    def wait_for_nodes(self, count: int) -> None:
        """Waits until the last node says that it runs."""
        logs = list(self.where.folder.glob("ray-*.log"))
        assert len(logs) == count
        try:
            self.where.wait_for(lambda: all(STARTED in log.read_text() for log in logs), "all nodes run", 180.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(f"{log.name}: {log.read_text()}" for log in logs)) from None

    def kill(self, name: str) -> int:
        """Kills all processes of a node at once, as when its plug is pulled; returns how many there were."""
        victims = [pid for pid in self.where.processes() if self.where.name_of(pid, NODE) == name]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # Stopped first, so that none sees another one die.
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        return len(victims)


@contextlib.contextmanager
def ray_nodes(where: Place, **extra: str) -> Iterator[RayNodes]:
    """A head node with one processor; everything of it is gone afterwards. Actors see the extra variables."""
    assert importlib.util.find_spec("ray"), "ray is missing, which this test needs: make test-launchers installs it"
    # The token file of this user, if there is one, is not ours.
    environment = {**HEALTH, **extra, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": where.mark, "RAY_DEDUP_LOGS": "0"}
    environment["RAY_raylet_start_wait_time_s"] = "120"
    environment["RAY_TMPDIR"] = str(where.folder / "ray")
    port = free_port_below(10000)
    with contextlib.ExitStack() as stack:
        nodes = RayNodes(where, f"127.0.0.2:{port}", environment, stack)
        folder = f"--temp-dir={where.folder / 'ray'}"
        nodes.add("head", "127.0.0.2", 1, "--head", f"--port={port}", "--include-dashboard=false", folder)
        nodes.wait_for_nodes(1)
        yield nodes


def free_port_below(limit: int) -> int:
    """A port that Ray's own processes do not take: theirs begin at 10002."""
    for port in range(limit - 1000 + os.getpid() % 900, limit):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.2", port))
            return port
    return free_port()
