"""What a worker is told when it is started.  [core]"""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from ayni.endpoints import ClientTls, ServerLimits, ServerTls
from worker_agent.blocks_config import BlocksConfig
from worker_agent.launchers import LaunchConfig

_NAMES = {
    "backend": ("auto", "cuda", "wgpu", "cpu"),
    "wgpu_engine": ("auto", "mps", "xpu", "torchvulkan", "wgpu_gemm"),
    "attach": ("auto", "always", "never"),
    "gradients": ("auto", "grpc"),
    "log_format": ("text", "json"),
    "log_level": ("debug", "info", "warning", "error"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """How a worker finds its run, computes and reports."""

    coordinator: str
    """Address of the coordinator, host:port."""
    token_file: Path | None = None
    """File with the run's join token. AYNI_TOKEN in the environment does as well."""
    run_id: str = ""
    """Run to join. Empty: whichever the coordinator has."""
    name: str = ""
    """Name among the run's workers. Empty: host name and process id."""
    backend: str = "auto"
    """Where to compute: auto (cuda, wgpu, cpu, the first that is there), cuda, wgpu or cpu."""
    wgpu_engine: str = "auto"
    """Engine of backend wgpu: auto (the first that works), mps, xpu, torchvulkan or wgpu_gemm."""
    allow_software_gpu: bool = False
    """Take a software driver where backend wgpu was asked for by name; for tests, since it is slower than cpu."""
    offload_min_flops: int = 100_000_000
    """Smallest matrix product, in floating-point operations, that engine wgpu_gemm sends to the GPU."""
    threads: int = 1
    """Threads of torch's own arithmetic on the CPU."""
    cache_dir: Path = Path("~/.cache/ayni")
    """Folder that keeps the runs' files between runs; workers of one machine share it."""
    output_dir: Path | None = None
    """Folder for metrics and, on one worker, checkpoints. Empty: ayni-output/RUN_ID/NAME."""
    checkpoint_every: int = 0
    """Steps between checkpoints "last". 0: only at the end. The best evaluation is always kept."""
    tensorboard: bool = True
    """Write TensorBoard scalars beside the metrics, where the package is installed."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers that the same numbers go to: wandb, mlflow."""
    timeline: bool = False
    """Write down, beside the metrics, when each bucket of each step was computed, sent, received and applied, for
    scripts/plot_run.py --timeline."""
    listen: str = "127.0.0.1:0"
    """Where this worker's own service listens, host:port; port 0 picks one and prints it."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """This worker's place among those that a launcher has started, where one has."""
    tls: ClientTls = field(default_factory=ClientTls)
    """TLS towards the coordinator."""
    server_tls: ServerTls = field(default_factory=ServerTls)
    """TLS of this worker's own service."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    """How much this worker's own service takes at a time."""
    blocks: BlocksConfig = field(default_factory=BlocksConfig)
    """The block half: where lower tiers lie, by which engines others reach this worker."""
    insecure: bool = False
    """Speak in clear with other addresses than loopback: token and gradients can be read on the way."""
    connect_timeout: timedelta = timedelta(seconds=60)
    """How long to try to reach the coordinator before giving up with exit code 75."""
    exchange_timeout: timedelta = timedelta(minutes=40)
    """Longest time for one bucket or one commit; longer than the coordinator's limit for a step."""
    fetch_timeout: timedelta = timedelta(minutes=2)
    """Longest silence while a file of the run is fetched."""
    cache_timeout: timedelta = timedelta(minutes=30)
    """Longest wait for another process of this machine that fetches the same file."""
    rejoin_timeout: timedelta = timedelta(minutes=10)
    """How long to try to come back when the coordinator is gone, before giving up with exit code 75."""
    onboard_timeout: timedelta = timedelta(minutes=2)
    """Longest time to fetch the run's state from another worker or from the object store."""
    max_microbatches: int = 0
    """Most micro-batches of one step that this worker takes. 0: no limit."""
    follow_bytes: int = 1 << 30
    """Most memory for the means of the steps that the others make while this worker fetches the run's state."""
    gradients: str = "auto"
    """How gradients travel: auto through memory shared with the coordinator, or the workers that reduce, where they run
    on this host, as the same user; grpc always over gRPC."""
    attach: str = "auto"
    """Whether calls to this worker travel back over a stream that it opens to the coordinator: always, never, or auto:
    when it listens on loopback and the coordinator is elsewhere."""
    serve_after: timedelta = timedelta(0)
    """How long to go on serving blocks, such as the published train state, after the run; a signal ends it earlier."""
    traces: str = ""
    """OTLP receiver over gRPC that gets this worker's spans of every step that the coordinator traces, such as
    http://127.0.0.1:4317. Empty: what the variables OTEL_EXPORTER_OTLP_ENDPOINT and others say; off: none. Needs the
    extra otel."""
    log_format: str = "text"
    """text for people (with a live line in a terminal) or json for machines."""
    log_level: str = "info"
    """debug, info, warning or error."""

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        for name, allowed in _NAMES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if self.threads < 1 or self.checkpoint_every < 0:
            raise ValueError("threads must be at least 1 and checkpoint_every at least 0")
        if self.offload_min_flops < 0:
            raise ValueError("offload_min_flops must be at least 0")
        if len(self.name.encode()) > 128:
            raise ValueError("name is longer than 128 bytes")
        if self.max_microbatches < 0 or self.follow_bytes < 1:
            raise ValueError("max_microbatches must be at least 0 and follow_bytes at least 1")
        times = ("connect_timeout", "exchange_timeout", "fetch_timeout", "cache_timeout", "onboard_timeout")
        for name in (*times, "rejoin_timeout"):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name} must be longer than 0 s")
        if self.serve_after < timedelta(0):
            raise ValueError("serve_after must not be negative")
