"""Sends torch's matrix products to a GPU, forward and backward, without a change to the model.  [shell]

While the mode is on, `mm`, `addmm` and `bmm` of float32 tensors on the CPU that are large enough are computed by
`GemmDevice`; all the rest of torch goes on as ever. That reaches backward too, because torch runs backward of CPU
tensors on the thread that asks for it. The mode belongs to the thread that has entered it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from worker_agent.portable.gemm_device import GemmDevice
from worker_agent.portable.gemm_plan import Shape

_aten = torch.ops.aten


class GemmMode(TorchDispatchMode):
    """A context in which large matrix products run on a GPU."""

    def __init__(self, device: GemmDevice, min_flops: int) -> None:
        """Takes what computes, and from how many floating-point operations on it is worth the way."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_products = 0
        """Products that ran on the GPU."""
        self.num_flops = 0
        """Floating-point operations of these."""
        self.num_fallbacks = 0
        """Products that were large enough but ran on the CPU, because they are not in float32 or too long."""
        self._device, self._min_flops = device, min_flops
        self._products: dict[Any, Callable[..., Tensor | None]] = {
            _aten.mm.default: self._mm,
            _aten.bmm.default: self._bmm,
            _aten.addmm.default: self._addmm,
        }

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Computes a product on the GPU, or lets torch do what it would."""
        product = self._products.get(func)
        result = product(*args, **(kwargs or {})) if product else None
        return func(*args, **(kwargs or {})) if result is None else result

    def _mm(self, left: Tensor, right: Tensor) -> Tensor | None:
        result = self._bmm(left.unsqueeze(0), right.unsqueeze(0))
        return None if result is None else result[0]

    def _addmm(self, added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
        result = self._mm(left, right)
        if result is None:
            return None
        if alpha != 1:
            result.mul_(alpha)
        return result.add_(added, alpha=beta) if beta else result

    def _bmm(self, left: Tensor, right: Tensor) -> Tensor | None:
        shape = Shape(z=left.shape[0], m=left.shape[1], n=right.shape[2], k=left.shape[2])
        if not shape.flops or shape.flops < self._min_flops or left.device.type != "cpu":
            return None
        is_float32 = left.dtype == right.dtype == torch.float32
        if not is_float32 or shape.k * left.element_size() > self._device.most_bytes:
            self.num_fallbacks += 1
            return None
        result = self._device.multiply(left, right)
        self.num_products += 1
        self.num_flops += shape.flops
        return result
