"""What the block half of a worker is told when it is started.  [core]"""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

from ayni.endpoints import ClientTls, ServerLimits, ServerTls


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksConfig:
    """Where a worker's lower tiers lie, and by which engines others reach it."""

    root: Path = Path("ayni-blocks")
    """Folder of the disk tier and of local object stores; a leader names folders below it."""
    engines: tuple[str, ...] = ("shm", "grpc")
    """Engines that may be used, best first: shm, nixl, grpc. One that is not installed or not possible here is left out
    with a log line. nixl must be asked for: it knows neither tokens nor TLS."""
    copy_threads: int = 2
    """Threads that copy blocks."""
    disk_sync: Literal["never", "close", "always"] = "close"
    """When blocks of the disk tier are forced to the disk: never, when the worker ends, or after each write."""
    connect_timeout: timedelta = timedelta(seconds=30)
    """Longest time to connect to one remote group."""

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        known = ("shm", "nixl", "grpc")
        if unknown := [name for name in self.engines if name not in known]:
            raise ValueError(f"engines has {', '.join(unknown)}; known are {', '.join(known)}")
        if not self.engines or len(set(self.engines)) != len(self.engines):
            raise ValueError("engines must name at least one engine, and each once")
        if self.copy_threads < 1:
            raise ValueError("copy_threads must be at least 1")
        if self.connect_timeout <= timedelta(0):
            raise ValueError("connect_timeout must be longer than 0 s")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """How an agent that only serves blocks listens, and what it has."""

    layouts: Path
    """YAML file that says which layouts the agent has; see docs/blocks.md."""
    listen: str = "127.0.0.1:0"
    """Where the service listens, host:port; port 0 picks one and prints it."""
    token_file: Path | None = None
    """File with the token that callers and peers must give. AYNI_TOKEN in the environment does as well."""
    blocks: BlocksConfig = field(default_factory=BlocksConfig)
    """Tiers and engines."""
    tls: ClientTls = field(default_factory=ClientTls)
    """TLS towards peers."""
    server_tls: ServerTls = field(default_factory=ServerTls)
    """TLS of this agent's own service."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    """How much this agent's service takes at a time."""
    insecure: bool = False
    """Speak in clear with other addresses than loopback: token and blocks can be read on the way."""
    log_format: Literal["text", "json"] = "text"
    """text for people or json for machines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """debug, info, warning or error."""
