"""Resolves a backend's name to a device.  [shell]

Order of "auto": cuda, wgpu, cpu. wgpu stands for several engines (`worker_agent.portable`), of which the first is taken
that gives what the CPU gives. "auto" never takes a software driver.
"""

import logging
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from worker_agent.portable.engines import Finding, title
from worker_agent.portable.opening import open_engine
from worker_agent.portable.probing import Probe, choose

_log = logging.getLogger(__name__)

BACKENDS = ("auto", "cuda", "wgpu", "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class PortableWishes:
    """What a worker is told of backend wgpu."""

    engine: str = "auto"
    """The only engine to try; "auto" for all of them."""
    allow_software: bool = False
    """Whether a software driver will do where backend wgpu was asked for by name."""
    min_flops: int = 100_000_000
    """Smallest matrix product that engine wgpu_gemm sends to the GPU."""
    probe: Probe | None = None
    """Replaces the child process that probes an engine."""


_DEFAULT_WISHES = PortableWishes()


def no_fallbacks() -> int:
    """Returns 0: nothing gives work back to the CPU."""
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Where a worker computes."""

    name: str
    """"cuda", "wgpu" or "cpu"."""
    device: torch.device
    """The one device that the worker's replica lives on."""
    device_names: tuple[str, ...]
    """Names for people, such as "NVIDIA H200"."""
    gpu_count: int
    """Accelerators that the worker sees; 0 for "cpu" and for software drivers."""
    memory_bytes: int
    """Memory that the worker computes in."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """What training runs in, on the thread that trains."""
    fallbacks: Callable[[], int] = no_fallbacks
    """Operations so far that ran on the CPU because the device does not have them."""


def resolve(name: str, wishes: PortableWishes = _DEFAULT_WISHES) -> Backend:
    """Returns the backend of this machine with this name.

    Args:
        name: "auto", "cuda", "wgpu" or "cpu".
        wishes: what is asked of backend wgpu.

    Raises:
        ValueError: there is no such backend, or it is not available here.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} must be one of {', '.join(BACKENDS)}")
    if name == "wgpu":
        return _wgpu(wishes)
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"backend cuda is not available on this machine: {why_no_cuda()}; use auto or cpu")
    if name == "cpu":
        return _cpu()
    return _cuda() if torch.cuda.is_available() else _wgpu_or_cpu(wishes)


def _wgpu_or_cpu(wishes: PortableWishes) -> Backend:
    choice = choose(wishes.engine, allow_software=False, probe=wishes.probe)
    if choice.taken:
        return _opened(choice.taken, wishes)
    if any(finding.device_name and not finding.software for finding in choice.findings):
        _log.warning("there is a GPU that can't be used, so this worker computes on the cpu: %s", choice.reasons())
    return _cpu()


def _wgpu(wishes: PortableWishes) -> Backend:
    choice = choose(wishes.engine, allow_software=wishes.allow_software, probe=wishes.probe)
    if choice.taken is None:
        raise ValueError(
            f"backend wgpu is not available on this machine: {choice.reasons()}; use auto or cpu; "
            "python -m worker_agent doctor tells more"
        )
    if choice.taken.software:
        _log.warning("%s is a software driver: right, but slower than backend cpu; for tests only", title(choice.taken))
    return _opened(choice.taken, wishes)


def _opened(finding: Finding, wishes: PortableWishes) -> Backend:
    opened = open_engine(finding.engine, wishes.min_flops)
    return Backend(
        name="wgpu",
        device=opened.device,
        device_names=(title(finding),),
        gpu_count=0 if opened.software else 1,
        memory_bytes=opened.memory_bytes or _host_memory_bytes(),
        context=opened.context,
        fallbacks=opened.fallbacks,
    )


def _cuda() -> Backend:
    count = torch.cuda.device_count()
    return Backend(
        name="cuda",
        device=torch.device("cuda", torch.cuda.current_device()),
        device_names=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        gpu_count=count,
        memory_bytes=sum(torch.cuda.get_device_properties(index).total_memory for index in range(count)),
    )


def _cpu() -> Backend:
    return Backend(
        name="cpu",
        device=torch.device("cpu"),
        device_names=(_processor_name(),),
        gpu_count=0,
        memory_bytes=_host_memory_bytes(),
    )


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def why_no_cuda() -> str:
    """Returns half a sentence."""
    if torch.version.cuda is None:
        return f"this build of torch ({torch.__version__}) has no CUDA"
    return "torch finds no CUDA device or driver"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
