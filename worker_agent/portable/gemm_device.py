"""Matrix products of CPU tensors on a GPU, through wgpu.  [shell]

Legend: M rows, N columns, K the dimension that is summed over; Z products of one batch; all float32.

Copies: each operand goes to the device once (a transposed one as it lies in memory), the result comes back once.
Buffers are kept, by powers of two. One product at a time: a lock is around each.
"""

import os
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker_agent.portable.engines import Device, best_device
from worker_agent.portable.gemm_plan import TILE, Shape, buffer_bytes, k_parts, parts
from worker_agent.portable.gemm_shader import PARAMETERS_BYTES, source

_LIMITS = ("max-storage-buffer-binding-size", "max-buffer-size")


def adapters() -> list[tuple[Device, Any]]:
    """Returns the GPUs that wgpu reaches by the system's own interfaces, with wgpu's objects.

    Raises:
        ImportError: wgpu is not installed.
    """
    import wgpu
    from wgpu.backends.wgpu_native.extras import set_instance_extras

    if "XDG_RUNTIME_DIR" not in os.environ:
        # Mesa's layer that sorts devices would ask a display server which is not there, and complain aloud.
        os.environ.setdefault("NODEVICE_SELECT", "1")
    # Unasked it would look for OpenGL too, which finds software on machines without any driver, and complains aloud.
    own = {"darwin": ["Metal"], "win32": ["D3D12", "Vulkan"]}.get(sys.platform, ["Vulkan"])
    set_instance_extras(backends=own)
    found = wgpu.gpu.enumerate_adapters_sync()
    return [(_device(index, adapter.info), adapter) for index, adapter in enumerate(found)]


def _device(index: int, info: Any) -> Device:
    return Device(
        index=index,
        name=str(info.get("device", "")),
        vendor_id=int(info.get("vendor_id", 0)),
        adapter_type=str(info.get("adapter_type", "")),
    )


class GemmDevice:
    """One GPU, and the buffers that are kept on it."""

    def __init__(self, device: Device, adapter: Any) -> None:
        """Opens the device and compiles the shader."""
        import wgpu

        self.device = device
        limits = {name: adapter.limits[name] for name in _LIMITS if name in adapter.limits}
        self.most_bytes = min(limits.values())
        """Longest operand or result of one dispatch."""
        self._wgpu: Any = wgpu
        self._device = adapter.request_device_sync(required_limits=limits)
        shader = self._device.create_shader_module(code=source())
        self._pipeline = self._device.create_compute_pipeline(
            layout="auto", compute={"module": shader, "entry_point": "multiply"}
        )
        self._lock = threading.Lock()
        self._spare: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)

    @classmethod
    def open_best(cls) -> "GemmDevice":
        """Opens the best adapter.

        Raises:
            ImportError: wgpu is not installed.
            RuntimeError: it finds no GPU.
        """
        found = adapters()
        best = best_device([device for device, _ in found])
        if best is None:
            raise RuntimeError("wgpu finds no GPU that has a driver")
        return cls(best, found[best.index][1])

    def multiply(self, left_ZMK: Tensor, right_ZKN: Tensor) -> Tensor:
        """Returns the products, shape [Z, M, N], contiguous.

        Raises:
            ValueError: one row is too long for the device.
        """
        shape = Shape(z=left_ZMK.shape[0], m=left_ZMK.shape[1], n=right_ZKN.shape[2], k=left_ZMK.shape[2])
        out_ZMN = torch.empty((shape.z, shape.m, shape.n), dtype=torch.float32)
        for part in parts(shape, self.most_bytes):
            left = left_ZMK[part.z : part.z_stop, part.m : part.m_stop]
            right = right_ZKN[part.z : part.z_stop, :, part.n : part.n_stop]
            # Torch has no lock around its tensors, and wgpu has none around its queue.
            with self._lock:
                out_ZMN[part.z : part.z_stop, part.m : part.m_stop, part.n : part.n_stop] = self._part(left, right)
        return out_ZMN

    def _part(self, left_ZMK: Tensor, right_ZKN: Tensor) -> Tensor:
        z, m, k = left_ZMK.shape
        n = right_ZKN.shape[2]
        left, right = _laid_out(left_ZMK), _laid_out(right_ZKN)
        borrowed: list[tuple[tuple[str, int], Any]] = []
        try:
            a, b = (self._upload(operand, borrowed) for operand in (left, right))
            c = self._buffer("storage", z * m * n * 4, borrowed)
            heads = [self._parameters(left, right, (m, n, start, stop), borrowed) for start, stop in k_parts(max(k, 1))]
            groups = (-(-n // TILE), -(-m // TILE), z)
            return self._run((a, b, c), heads, groups, borrowed).view(z, m, n)
        finally:
            for key, buffer in borrowed:
                self._spare[key].append(buffer)

    def _run(
        self, operands: Sequence[Any], heads: Sequence[Any], groups: tuple[int, int, int], borrowed: list[Any]
    ) -> Tensor:
        """Dispatches once for each of `heads`, reads the result, and waits for it."""
        result = operands[2]
        back = self._buffer("readback", result[1], borrowed)
        encoder = self._device.create_command_encoder()
        for head in heads:
            # Each in a pass of its own, because it adds to what the one before has written.
            work = encoder.begin_compute_pass()
            work.set_pipeline(self._pipeline)
            work.set_bind_group(0, self._bind_group([*operands, head]))
            work.dispatch_workgroups(*groups)
            work.end()
        encoder.copy_buffer_to_buffer(result[0], 0, back[0], 0, result[1])
        self._device.queue.submit([encoder.finish()])
        back[0].map_sync(self._wgpu.MapMode.READ, 0, result[1])
        try:
            mapped = back[0].read_mapped(0, result[1], copy=False)
            return torch.from_numpy(np.frombuffer(mapped, np.float32).copy())
        finally:
            back[0].unmap()

    def _bind_group(self, buffers: Sequence[Any]) -> Any:
        return self._device.create_bind_group(
            layout=self._pipeline.get_bind_group_layout(0),
            entries=[
                {"binding": index, "resource": {"buffer": buffer, "offset": 0, "size": size}}
                for index, (buffer, size) in enumerate(buffers)
            ],
        )

    def _upload(self, operand: Tensor, borrowed: list[Any]) -> tuple[Any, int]:
        """Copies an operand as it lies in memory."""
        flat = torch.as_strided(operand, (operand.numel(),), (1,))
        buffer, size = self._buffer("storage", operand.numel() * 4, borrowed)
        self._device.queue.write_buffer(buffer, 0, flat.numpy())
        return buffer, size

    def _parameters(
        self, left: Tensor, right: Tensor, extent: tuple[int, int, int, int], borrowed: list[Any]
    ) -> tuple[Any, int]:
        m, n, start, stop = extent
        (a_z, a_m, a_k), (b_z, b_k, b_n) = left.stride(), right.stride()
        head = (m, n, stop - start, int(start > 0))
        values = (*head, a_z, a_m, a_k, start * a_k, b_z, b_k, b_n, start * b_k, m * n, 0, 0, 0)
        buffer, _ = self._buffer("uniform", PARAMETERS_BYTES, borrowed)
        self._device.queue.write_buffer(buffer, 0, struct.pack("<16I", *values))
        return buffer, PARAMETERS_BYTES

    def _buffer(self, kind: str, num_bytes: int, borrowed: list[Any]) -> tuple[Any, int]:
        """Returns a buffer of at least so many bytes, and how many of it are used."""
        key = kind, min(buffer_bytes(num_bytes), max(self.most_bytes, num_bytes))
        usage = self._wgpu.BufferUsage
        usages = {
            "storage": usage.STORAGE | usage.COPY_DST | usage.COPY_SRC,
            "uniform": usage.UNIFORM | usage.COPY_DST,
            "readback": usage.MAP_READ | usage.COPY_DST,
        }
        spare = self._spare[key]
        buffer = spare.pop() if spare else self._device.create_buffer(size=key[1], usage=usages[kind])
        borrowed.append((key, buffer))
        return buffer, num_bytes


def _laid_out(operand: Tensor) -> Tensor:
    """Returns an operand that fills its memory without gaps, rows first or columns first; a copy where it does not."""
    is_dense = operand.is_contiguous() or operand.transpose(1, 2).is_contiguous()
    return operand.detach() if is_dense else operand.detach().contiguous()
