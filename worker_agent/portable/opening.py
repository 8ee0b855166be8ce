"""Opens an engine of backend `wgpu` in this process.  [shell]

Importing torchvulkan changes torch for the whole process (it takes the one slot for devices of others), so nothing here
is imported before an engine is opened, and only the probe's child and a worker that has chosen the engine open one.
"""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from worker_agent.portable.engines import Device, best_device
from worker_agent.portable.fallbacks import FallbackCounter

EXTRA = "pip install 'ayni[wgpu]'"


class EngineAbsent(Exception):
    """An engine can't be opened here; the message is half a sentence that says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenEngine:
    """An engine that this process can compute with."""

    engine: str
    device: torch.device
    """Where models and batches go."""
    device_name: str
    software: bool
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """What training runs in; enter it on the thread that trains."""
    fallbacks: Callable[[], int]
    """Operations that ran on the CPU because the engine does not have them."""
    products: Callable[[], int] | None = None
    """Matrix products that ran on the GPU, where that is all that runs there."""
    bfloat16: bool = False
    memory_bytes: int = 0


def absence(engine: str) -> str:
    """Returns why an engine is not there at all, as half a sentence; empty where it may be. Imports no engine."""
    if engine == "mps":
        return "" if torch.backends.mps.is_available() else "this torch finds no Apple GPU"
    if engine == "xpu":
        return "" if torch.xpu.is_available() else "this torch finds no Intel GPU (it needs torch's build for xpu)"
    module = {"torchvulkan": "torchvulkan", "wgpu_gemm": "wgpu"}[engine]
    if importlib.util.find_spec(module) is None:
        return f"package {module} is not installed: {EXTRA}"
    return ""


def open_engine(engine: str, min_flops: int) -> OpenEngine:
    """Opens an engine on its best device.

    Args:
        engine: one of `ENGINES`.
        min_flops: smallest product that wgpu_gemm sends to the GPU.

    Raises:
        EngineAbsent: it is not there, or has no device.
    """
    if reason := absence(engine):
        raise EngineAbsent(reason)
    if engine == "wgpu_gemm":
        return _wgpu_gemm(min_flops)
    return {"mps": _mps, "xpu": _xpu, "torchvulkan": _torchvulkan}[engine]()


def _mps() -> OpenEngine:
    counter = FallbackCounter()
    return OpenEngine(
        engine="mps",
        device=torch.device("mps"),
        device_name="Apple GPU",
        software=False,
        fallbacks=lambda: counter.total,
        memory_bytes=int(torch.mps.recommended_max_memory()),
    )


def _xpu() -> OpenEngine:
    index = torch.xpu.current_device()
    properties: Any = torch.xpu.get_device_properties(index)
    counter = FallbackCounter()
    return OpenEngine(
        engine="xpu",
        device=torch.device("xpu", index),
        device_name=str(properties.name),
        software=False,
        fallbacks=lambda: counter.total,
        bfloat16=bool(torch.xpu.is_bf16_supported()),
        memory_bytes=int(properties.total_memory),
    )


def _torchvulkan() -> OpenEngine:
    try:
        import torchvulkan
    except (ImportError, RuntimeError, OSError) as error:
        raise EngineAbsent(f"torchvulkan can't be loaded: {error}") from error
    # Without a driver, or without a Vulkan loader, there are no devices.
    described = [torchvulkan.get_device_properties(index) for index in range(torchvulkan.device_count())]
    devices = [
        Device(index=index, name=str(one.name), vendor_id=int(one.vendor_id)) for index, one in enumerate(described)
    ]
    if (best := best_device(devices)) is None:
        raise EngineAbsent("there is no Vulkan 1.3 driver with a device")
    torchvulkan.set_device(best.index)
    counter = FallbackCounter()
    return OpenEngine(
        engine="torchvulkan",
        device=torch.device("vulkan", best.index),
        device_name=best.name,
        software=best.is_software,
        fallbacks=lambda: counter.total,
        bfloat16=bool(torchvulkan.is_bf16_supported()),
        memory_bytes=int(described[best.index].total_memory),
    )


def _wgpu_gemm(min_flops: int) -> OpenEngine:
    from worker_agent.portable.gemm_device import GemmDevice
    from worker_agent.portable.gemm_mode import GemmMode

    try:
        device = GemmDevice.open_best()
    except (ImportError, RuntimeError, OSError) as error:
        raise EngineAbsent(str(error)) from error
    mode = GemmMode(device, min_flops)
    return OpenEngine(
        engine="wgpu_gemm",
        device=torch.device("cpu"),
        device_name=device.device.name,
        software=device.device.is_software,
        context=lambda: mode,
        fallbacks=lambda: mode.num_fallbacks,
        products=lambda: mode.num_products,
    )
