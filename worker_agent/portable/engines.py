"""Engines of backend `wgpu`: in which order they are tried, which devices are real, which finding is taken.  [core]

Legend: a finding is what is known of one engine on this machine, after it was probed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ENGINES = ("mps", "xpu", "torchvulkan", "wgpu_gemm")
"""In the order in which they are tried: what torch has itself first, what moves operands for each product last."""

SOFTWARE_ADAPTER = "CPU"
"""What wgpu calls an adapter without a GPU."""
MAX_ERROR = 1e-3
"""Largest error of a probe, relative to each tensor's largest element. Rounding alone is below 1e-5."""

_SOFTWARE_VENDORS = {0x10005: "Mesa", 0x1AE0: "Google", 0x1414: "Microsoft"}
_SOFTWARE_NAMES = ("llvmpipe", "lavapipe", "softpipe", "swiftshader", "basic render", "warp adapter")
_ADAPTERS = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "Unknown", SOFTWARE_ADAPTER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is known of one engine here."""

    engine: str
    device_name: str = ""
    """The device's own name; empty where there is none."""
    software: bool = False
    """Whether the device is a program on the CPU that behaves like a GPU."""
    error: float | None = None
    """Largest error of the probe, relative to each tensor's largest element; None where it was not probed."""
    bfloat16: bool = False
    """Whether the device computes in bfloat16 itself."""
    memory_bytes: int = 0
    """Memory of the device; 0 for not known."""
    fallbacks: int = 0
    """Operations of the probe that ran on the CPU because the engine does not have them."""
    seconds: float = 0.0
    """How long the probe took."""
    refusal: str = ""
    """Why the engine can't be used; empty where the probe went well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device, as an engine's own library describes it."""

    index: int
    name: str
    vendor_id: int = 0
    adapter_type: str = ""
    """As wgpu calls it; empty where the library does not say."""

    @property
    def is_software(self) -> bool:
        """Whether it is a program on the CPU."""
        return (
            self.adapter_type == SOFTWARE_ADAPTER
            or self.vendor_id in _SOFTWARE_VENDORS
            or any(name in self.name.lower() for name in _SOFTWARE_NAMES)
        )


def best_device(devices: Sequence[Device]) -> Device | None:
    """Returns the device to use: real ones first, of those the discrete ones, then in the library's order."""

    def order(device: Device) -> tuple[bool, int, int]:
        kind = _ADAPTERS.index(device.adapter_type) if device.adapter_type in _ADAPTERS else 0
        return device.is_software, kind, device.index

    return min(devices, key=order, default=None)


def refusal_of(finding: Finding, *, allow_software: bool) -> str:
    """Returns why an engine is not used, as half a sentence; empty for a usable one."""
    if finding.refusal:
        return finding.refusal
    if finding.software and not allow_software:
        return (
            f"{finding.device_name} is a software driver, slower than cpu (for tests: --backend wgpu "
            "--allow-software-gpu)"
        )
    if finding.error is None:
        return "it was not probed"
    if not finding.error < MAX_ERROR:
        return f"the probe was wrong by {finding.error:.1e} on {finding.device_name}; at most {MAX_ERROR:g} is allowed"
    return ""


def engines_to_try(engine: str) -> tuple[str, ...]:
    """Returns the engines that a worker may use: all of them for "auto", or the one that was named.

    Raises:
        ValueError: there is no such engine.
    """
    if engine == "auto":
        return ENGINES
    if engine not in ENGINES:
        raise ValueError(f"wgpu_engine is {engine!r}; it must be one of auto, {', '.join(ENGINES)}")
    return (engine,)


def title(finding: Finding) -> str:
    """Returns the name of a finding's device for people, with the engine that reaches it."""
    kind = "software, " if finding.software else ""
    return f"{finding.device_name} ({kind}{finding.engine})"
