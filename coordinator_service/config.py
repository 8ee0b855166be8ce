"""The coordinator's own settings, and the run file.  [core]"""

from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from ayni.endpoints import ClientTls, ServerLimits, ServerTls
from ayni.run_config import RunConfig
from coordinator_service.wire_types import check_changes


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Every time that the coordinator waits, and their order."""

    heartbeat_interval: timedelta = timedelta(seconds=1)
    """How often a worker sends a sign of life."""
    lease: timedelta = timedelta(seconds=10)
    """How long a silent worker is believed alive."""
    accept: timedelta = timedelta(seconds=15)
    """How long a stream, or a lane of one, may take to say what it is about."""
    step: timedelta = timedelta(minutes=30)
    """How long a step may take before the run halts and says who was being waited for."""
    drain: timedelta = timedelta(seconds=20)
    """How long a refused contribution is read and discarded, so that the refusal reaches its sender."""
    store: timedelta = timedelta(minutes=10)
    """How long the workers may take to store a published state before it is given up."""
    shutdown: timedelta = timedelta(seconds=20)
    """How long the coordinator waits at the end for its workers to leave."""
    comeback: timedelta = timedelta(seconds=1)
    """How long a coordinator that was started again waits, once enough workers are back, for the others that were there
    before."""
    rejoin: timedelta = timedelta(seconds=30)
    """How long the run waits for a worker that holds its newest state, before it goes on from a stored one."""
    onboard: timedelta = timedelta(minutes=2)
    """How long a worker may take to get the run's state from another one, before it is offered elsewhere."""
    group: timedelta = timedelta(minutes=30)
    """How long the processes of a group of backend "ayni" wait for those that are missing, from the first one on."""

    def __post_init__(self) -> None:
        """Checks the ladder."""
        ladder = [(name, getattr(self, name)) for name in ("heartbeat_interval", "lease", "accept", "step")]
        if any(lower >= higher for (_, lower), (_, higher) in pairwise(ladder)):
            steps = " < ".join(f"{name} ({value.total_seconds():g} s)" for name, value in ladder)
            raise ValueError(f"each timeout must be longer than the one before it: {steps}")
        positive = ("heartbeat_interval", "drain", "store", "shutdown", "comeback", "rejoin", "onboard", "group")
        if short := [name for name in positive if getattr(self, name) <= timedelta(0)]:
            raise ValueError(f"{', '.join(short)} must be longer than 0 s")


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerConfig:
    """When a worker counts as late: median + mad_factor x MAD of the workers' arrival times, within bounds."""

    shortest: timedelta = timedelta(seconds=2)
    """Nobody is late before this."""
    longest: timedelta = timedelta(seconds=60)
    """Everybody is late after this, and nobody before it while no arrival is known."""
    mad_factor: float = 6.0
    """How many median absolute deviations above the median an arrival is late."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        if not timedelta(0) < self.shortest <= self.longest:
            raise ValueError("stragglers.shortest must be longer than 0 s and at most stragglers.longest")
        if not self.mad_factor > 0:
            raise ValueError(f"stragglers.mad_factor is {self.mad_factor}; it must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile(RunConfig):
    """A run file: the run, its files, and how the coordinator serves it."""

    artifacts: Path | None = None
    """Folder whose files every worker gets: model, tokenizer, data. A relative path starts at the working folder."""
    num_training_samples: int = 0
    """Samples of the training data, where the workers do not say it: a worker that joins with another number is
    refused. Tasks in tree say it themselves."""
    listen: str = "127.0.0.1:0"
    """Address to listen on, host:port; port 0 picks one and prints it. Anything but loopback needs TLS or insecure."""
    token_file: Path | None = None
    """File with the join token. AYNI_TOKEN in the environment does as well. One of them is required."""
    state_dir: Path = Path("ayni-state")
    """Folder for the runs' databases, one subfolder for each run id."""
    database: str = ""
    """Where the run's state is kept instead of in state_dir: postgresql://USER@HOST/DATABASE. For coordinators whose
    disks are not durable."""
    fresh: bool = False
    """Throws away what an earlier run of the same id left in state_dir."""
    tls: ServerTls = field(default_factory=ServerTls)
    """TLS of the coordinator's server."""
    worker_tls: ClientTls = field(default_factory=ClientTls)
    """TLS towards the workers' own services, which the coordinator calls to have states stored."""
    insecure: bool = False
    """Serves other addresses than loopback without TLS: token and gradients travel in clear."""
    max_attempts: int = 100
    """Attempts at one step before the run halts. Among elastic workers a death costs none."""
    chunk_bytes: int = 1 << 20
    """Bytes of a gradient chunk: a multiple of 64 KiB, at most 2 MiB. With int8 it counts the float32 numbers that a
    chunk stands for, so that every length here holds whole blocks of 256 elements with one scale."""
    window_chunks: int = 8
    """Chunks of one contribution that wait in memory before its worker is slowed down."""
    worker_window_chunks: int = 32
    """The same over all contributions of a worker; each contribution may always have one."""
    max_bucket_bytes: int = 16 << 30
    """Longest gradient of one bucket; workers that reduce it among themselves (`sharded`, `torch`) hold to it, too."""
    exchange_share: float = 0.5
    """Part of a step that the exchange may take before the log says what would make it less. 0: never."""
    auto_wire: bool = False
    """Lets wire_type become a narrower one (float32, then bfloat16, then int8) between two steps, where the exchange
    has taken more than exchange_share of a step for long enough; it never becomes a wider one again. With local
    updates the log says how many inner steps would do instead."""
    wire_changes: dict[str, str] = field(default_factory=dict)
    """Steps from which on the wire type is another one, such as {"40": "bfloat16"}: how a replay makes steps of a run
    with auto_wire again."""
    gradients: str = "auto"
    """How gradients travel: auto through shared memory for workers of this host and user, over gRPC for others; grpc
    always over gRPC."""
    dashboard: str = ""
    """Address of a page that shows the run, with /metrics and /healthz, as host:port. Empty: none. On loopback it needs
    no token but for its buttons, elsewhere for everything. Needs the extra dashboard."""
    traces: str = ""
    """OTLP receiver over gRPC that gets a trace of every step, such as http://127.0.0.1:4317. Empty: what the variables
    OTEL_EXPORTER_OTLP_ENDPOINT and others say; off: none. Needs the extra otel."""
    log_format: str = "text"
    """"text" for people or "json" for machines."""
    log_level: str = "info"
    """"debug", "info", "warning" or "error"."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """Every time that the coordinator waits."""
    stragglers: StragglerConfig = field(default_factory=StragglerConfig)
    """When a worker's micro-batches are given to others as well, because it is late."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    """How much the coordinator's server takes at a time."""

    def __post_init__(self) -> None:
        """Checks sizes, names and what goes together."""
        RunConfig.__post_init__(self)
        if not 1 << 16 <= self.chunk_bytes <= 2 << 20 or self.chunk_bytes % (1 << 16):
            raise ValueError(f"chunk_bytes is {self.chunk_bytes}; it must be a multiple of 65536, up to 2097152")
        if not 1 <= self.window_chunks <= self.worker_window_chunks:
            raise ValueError(
                f"window_chunks ({self.window_chunks}) must be at least 1 and at most worker_window_chunks "
                f"({self.worker_window_chunks})"
            )
        if not 0 <= self.exchange_share < 1:
            raise ValueError(f"exchange_share is {self.exchange_share}; it must be at least 0 and below 1")
        if self.auto_wire and not self.exchange_share:
            raise ValueError("auto_wire needs an exchange_share above 0: the share that makes the wire type change")
        if self.auto_wire and self.wire_changes:
            raise ValueError("auto_wire and wire_changes exclude one another: either is the wire type chosen, or said")
        check_changes(self.wire_type, self.wire_changes)
        for name in ("max_attempts", "max_bucket_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name, value, allowed in (
            ("log_format", self.log_format, ("text", "json")),
            ("gradients", self.gradients, ("auto", "grpc")),
            ("log_level", self.log_level, ("debug", "info", "warning", "error")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
