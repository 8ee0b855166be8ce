"""python -m tests.support.fake_gpu_agent FLAGS: an agent on a machine with a GPU, which is lost in the middle of a run.

The GPU is the CPU under another name. At the LOSE_AT-th matrix product it raises what LOSE_WITH says, as torch does.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker_agent import backend
from worker_agent.__main__ import main


class LosingMode(TorchDispatchMode):
    """Counts products, and ends like a device that has fallen off its bus: from then on nothing works."""

    def __init__(self) -> None:
        super().__init__()
        self._left = int(os.environ["LOSE_AT"])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._left -= func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if self._left <= 0:
            raise RuntimeError(os.environ["LOSE_WITH"])
        return func(*args, **(kwargs or {}))


def with_gpu(resolve: Callable[..., backend.Backend]) -> Callable[..., backend.Backend]:
    def resolved(name: str, wishes: Any) -> backend.Backend:
        found = resolve("cpu", wishes)
        if name == "cpu":
            return found
        kind = "cuda" if name == "auto" else name
        return replace(found, name=kind, device_names=("A GPU",), gpu_count=1, context=LosingMode)

    return resolved


if __name__ == "__main__":
    backend.resolve = with_gpu(backend.resolve)
    sys.exit(main())
