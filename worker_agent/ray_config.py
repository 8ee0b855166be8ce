"""What agents on a Ray cluster are started with.  [core]"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from worker_agent.launchers import DEFAULT_PORT, LARGEST_WORLD


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """How many agents, what each takes of its node, and whose run it is."""

    agents: int
    """How many agents, each an actor of its own."""
    address: str = "auto"
    """The Ray cluster: auto (the one of this node), host:port of its head, or local for one on this machine alone."""
    run: Path | None = None
    """Run file: the coordinator is started with it, beside this process. None: the coordinator is there already."""
    coordinator: str = ""
    """Address of the coordinator, host:port. Empty, with run: this node's address and port."""
    port: int = DEFAULT_PORT
    """Port of the coordinator that is started with run."""
    cpus: float = 1.0
    """Processors that each agent takes of its node."""
    gpus: float = 0.0
    """GPUs that each agent takes of its node."""
    restarts: int = -1
    """How often Ray may start an agent again that was lost, with its node or without. -1: always."""
    token_file: Path | None = None
    """File with the run's join token, here; agents get the token itself. AYNI_TOKEN in the environment does as well."""
    insecure: bool = False
    """Lets the coordinator listen in clear on other addresses than loopback, and the agents dial it so."""
    log_format: str = "text"
    """text for people or json for machines."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        """Checks ranges, and that there is a coordinator."""
        if not 1 <= self.agents <= LARGEST_WORLD:
            raise ValueError(f"agents is {self.agents}; it must be 1 to {LARGEST_WORLD}")
        if self.cpus < 0 or self.gpus < 0 or self.restarts < -1 or not 1 <= self.port <= 65535:
            raise ValueError("cpus and gpus must be at least 0, restarts at least -1, port 1 to 65535")
        if not (self.run or self.coordinator):
            raise ValueError("run or coordinator is needed: a run file to start a coordinator with, or where one is")
        for name, value, allowed in (
            ("log_format", self.log_format, ("text", "json")),
            ("log_level", self.log_level, ("debug", "info", "warning", "error")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before "--", which are the driver's, and those after it, which are the agents'."""
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    return given[:cut], given[cut + 1 :]
