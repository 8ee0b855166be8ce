"""Resolves a backend's name to a device.  [shell]

Order of "auto": cuda, wgpu, cpu. wgpu is not part of this version: "auto" passes it over, and its name is refused.
"""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

BACKENDS = ("auto", "cuda", "wgpu", "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Where a worker computes."""

    name: str
    """"cuda" or "cpu"."""
    device: torch.device
    """The one device that the worker's replica lives on."""
    device_names: tuple[str, ...]
    """Names for people, such as "NVIDIA H200"."""
    gpu_count: int
    """Accelerators that the worker sees; 0 for "cpu"."""


def resolve(name: str) -> Backend:
    """Returns the backend of this machine with this name.

    Args:
        name: "auto", "cuda", "wgpu" or "cpu".

    Raises:
        ValueError: there is no such backend, or it is not available here.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} must be one of {', '.join(BACKENDS)}")
    if name == "wgpu":
        raise ValueError("backend wgpu is not available in this version; use auto, cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"backend cuda is not available on this machine: {_why_no_cuda()}; use auto or cpu")
    return _cuda() if name != "cpu" and torch.cuda.is_available() else _cpu()


def _cuda() -> Backend:
    count = torch.cuda.device_count()
    return Backend(
        name="cuda",
        device=torch.device("cuda", torch.cuda.current_device()),
        device_names=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        gpu_count=count,
    )


def _cpu() -> Backend:
    return Backend(name="cpu", device=torch.device("cpu"), device_names=(_processor_name(),), gpu_count=0)


def _why_no_cuda() -> str:
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
