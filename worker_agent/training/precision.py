"""Float32, or bfloat16 autocast where the device has it.  [shell]"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def check_precision(precision: str, model: nn.Module) -> None:
    """Refuses a precision that the model's device does not have.

    Raises:
        ValueError: says what to use instead.
    """
    device = _device(model)
    if precision == "bfloat16" and not _has_bfloat16(device):
        raise ValueError(f"this worker's {device.type} device has no fast bfloat16; use precision float32")


def autocast(precision: str, model: nn.Module) -> AbstractContextManager[object]:
    """Returns the context that a forward pass runs in."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(_device(model).type, dtype=torch.bfloat16)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type in ("vulkan", "xpu"):
        return bool(getattr(torch, device.type).is_bf16_supported())
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
