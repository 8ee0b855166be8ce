"""What `python -m worker_agent doctor` is told.  [core]"""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from ayni.endpoints import ClientTls


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """What is looked at, and how it is printed."""

    backend: str = "auto"
    """Backend that a worker would be started with: auto, cuda, wgpu or cpu."""
    wgpu_engine: str = "auto"
    """Engine of backend wgpu: auto (the first that works), mps, xpu, torchvulkan or wgpu_gemm."""
    allow_software_gpu: bool = False
    """Take a software driver where backend wgpu was asked for by name; for tests, since it is slower than cpu."""
    coordinator: str = ""
    """Address of a coordinator to measure the connection to, host:port. Empty: none is measured."""
    measure_for: timedelta = timedelta(seconds=2)
    """How long to measure in each direction."""
    token_file: Path | None = None
    """File with the run's join token. AYNI_TOKEN in the environment does as well."""
    tls: ClientTls = field(default_factory=ClientTls)
    """TLS towards the coordinator."""
    insecure: bool = False
    """Speak in clear with other addresses than loopback."""
    connect_timeout: timedelta = timedelta(seconds=10)
    """How long to try to reach the coordinator."""
    json: bool = False
    """Print one JSON object for machines."""

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        if self.backend not in ("auto", "cuda", "wgpu", "cpu"):
            raise ValueError(f"backend is {self.backend!r}; it must be one of auto, cuda, wgpu, cpu")
        if self.wgpu_engine not in ("auto", "mps", "xpu", "torchvulkan", "wgpu_gemm"):
            raise ValueError(
                f"wgpu_engine is {self.wgpu_engine!r}; it must be one of auto, mps, xpu, torchvulkan, wgpu_gemm"
            )
        if not timedelta(0) < self.measure_for <= timedelta(minutes=1) or self.connect_timeout <= timedelta(0):
            raise ValueError("measure_for must be above 0 s and at most 60 s, connect_timeout above 0 s")
