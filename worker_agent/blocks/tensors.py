"""Registers tensors that an engine already has as a layout: nothing is copied, both use the same memory.  [shell]

A layout is one tensor for all layers (fully contiguous) or one for each layer, as a paged KV cache has them. Blocks
come first in every tensor, but with keys and values outermost ("block second") they come second.

Legend: B blocks, L layers, O outer parts, T tokens of a page, H heads, D elements of a head.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from ayni.blocks.layouts import AxisOrder, LayoutConfig, LayoutKind, StorageKind
from ayni.errors import BadRequest
from worker_agent.blocks.device_memory import DeviceMemory
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory

_BLOCK_FIRST, _BLOCK_SECOND = LayoutKind.LAYER_SEPARATE_BLOCK_FIRST, LayoutKind.LAYER_SEPARATE_BLOCK_SECOND


def register_tensors(tensors: Sequence[torch.Tensor], geometry: Geometry) -> HostMemory | DeviceMemory:
    """Returns a layout over the tensors' own bytes.

    Args:
        tensors: the layout's allocations: one, or one for each layer. Flat, or with the block and outer axes in front
            as the kind says. On any one device.
        geometry: the layout; `paged_cache_geometry` finds that of a KV cache.

    Raises:
        BadRequest: a tensor is not contiguous, is a conjugated or negated view, has another size or element width than
            the layout, or is not aligned; two share bytes; they are on several devices.
    """
    for i, tensor in enumerate(tensors):
        _check_tensor(i, tensor, geometry)
    _check_count(tensors, geometry)
    _check_device(tensors)
    _check_apart(tensors)
    buffers = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    if buffers[0].device.type != "cpu":
        return DeviceMemory(geometry, buffers, keep=tuple(tensors))
    is_pinned = all(tensor.is_pinned() for tensor in tensors)
    storage = StorageKind.PINNED if is_pinned else StorageKind.SYSTEM
    return HostMemory(geometry, [buffer.numpy() for buffer in buffers], storage, keep=tuple(tensors))


def paged_cache_geometry(
    tensors: Sequence[torch.Tensor], axis_order: AxisOrder = AxisOrder.NHD, kind: LayoutKind | None = None
) -> Geometry:
    """Returns the layout that a paged KV cache is.

    Shapes, with T and H exchanged for HND:

    - one tensor [B, L, O, T, H, D] (UNIVERSAL: [B, H, L, O, T, D]): fully contiguous;
    - for each layer [B, 2, T, H, D]: block first; [2, B, T, H, D]: block second;
    - for each layer [B, T, H, D] or [B, T, D]: keys and values fused, as one outer part.

    Args:
        tensors: the cache.
        axis_order: NHD, HND or UNIVERSAL.
        kind: needed where the shape fits two kinds, that is, for two blocks.

    Raises:
        BadRequest: the shape fits no kind, or two; or the tensors' shapes differ.
    """
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) != 1 or len({tensor.dtype for tensor in tensors}) != 1:
        raise BadRequest(f"a paged cache has layers of one shape and dtype; these have {shapes}", field="tensors")
    shape = shapes.pop()
    found = kind or _kind_of(shape)
    extents = _extents(shape, found, axis_order, len(tensors))
    config = LayoutConfig(
        num_blocks=extents["B"],
        num_layers=extents["L"],
        outer_dim=extents["O"],
        page_size=extents["T"],
        inner_dim=extents["H"] * extents["D"],
        num_heads=extents["H"],
        dtype_width_bytes=tensors[0].element_size(),
    )
    return Geometry(config=config, kind=found, axis_order=axis_order)


def _kind_of(shape: tuple[int, ...]) -> LayoutKind:
    if len(shape) == 6:
        return LayoutKind.FULLY_CONTIGUOUS
    if len(shape) in (3, 4):
        return _BLOCK_FIRST
    fitting = [kind for place, kind in ((1, _BLOCK_FIRST), (0, _BLOCK_SECOND)) if shape[place : place + 1] == (2,)]
    if len(shape) != 5 or len(fitting) != 1:
        what = "two kinds; say which" if len(fitting) == 2 else "no kind of layout"
        raise BadRequest(f"layers of shape {shape} fit {what}", field="kind")
    return fitting[0]


def _extents(shape: tuple[int, ...], kind: LayoutKind, order: AxisOrder, num_tensors: int) -> dict[str, int]:
    inner = "HTD" if order is AxisOrder.HND else "TD" if len(shape) == 3 else "THD"
    if kind is LayoutKind.FULLY_CONTIGUOUS:
        names = "BHLOTD" if order is AxisOrder.UNIVERSAL else f"BLO{inner}"
    elif len(shape) in (3, 4):
        names = f"B{inner}"
    else:
        names = f"BO{inner}" if kind is _BLOCK_FIRST else f"OB{inner}"
    if len(names) != len(shape):
        raise BadRequest(f"tensors of shape {shape} are no {kind.value} layout in {order.value} order", field="kind")
    layers = {} if kind is LayoutKind.FULLY_CONTIGUOUS else {"L": num_tensors}
    return {"O": 1, "H": 1, **layers, **dict(zip(names, shape, strict=True))}


def _check_tensor(place: int, tensor: torch.Tensor, geometry: Geometry) -> None:
    config = geometry.config
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.is_contiguous():
        raise BadRequest(f"tensor {place} is not contiguous: only whole memory can be registered", field="tensors")
    if tensor.is_conj() or tensor.is_neg():
        # Its bytes are those of another tensor, whose values differ: torch only says that they do.
        detail = f"tensor {place} is a conjugated or negated view: its bytes are not its values"
        raise BadRequest(f"{detail}; register what resolve_conj().resolve_neg() gives", field="tensors")
    if tensor.element_size() != config.dtype_width_bytes:
        widths = f"elements of {tensor.element_size()} bytes; the layout has {config.dtype_width_bytes}"
        raise BadRequest(f"tensor {place} has {widths}", field="dtype_width_bytes")
    front = _front(geometry)
    if tensor.dim() > len(front) and tuple(tensor.shape[: len(front)]) != front:
        shape = f"{tuple(tensor.shape)}, which does not begin with {front}"
        raise BadRequest(f"tensor {place} of a {geometry.kind.value} layout has the shape {shape}", field="tensors")
    if tensor.data_ptr() % config.alignment_bytes:
        raise BadRequest(f"tensor {place} is not aligned to {config.alignment_bytes} bytes", field="alignment_bytes")


def _front(geometry: Geometry) -> tuple[int, ...]:
    """The first axes of a tensor that is not flat."""
    config = geometry.config
    if geometry.is_fully_contiguous or config.outer_dim == 1:
        return (config.num_blocks,)
    apart = (config.outer_dim, config.num_blocks)
    return apart if geometry.kind is _BLOCK_SECOND else apart[::-1]


def _check_count(tensors: Sequence[torch.Tensor], geometry: Geometry) -> None:
    required = geometry.allocation_bytes
    if len(tensors) != len(required):
        message = f"a {geometry.kind.value} layout of {geometry.config.num_layers} layers needs {len(required)}"
        raise BadRequest(f"{message} tensors; got {len(tensors)}", field="tensors")
    for i, (tensor, size) in enumerate(zip(tensors, required, strict=True)):
        if tensor.nbytes != size:
            raise BadRequest(f"tensor {i} needs {size} bytes; it has {tensor.nbytes}", field="tensors")


def _check_device(tensors: Sequence[torch.Tensor]) -> None:
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) != 1:
        raise BadRequest(f"a layout lies on one device; these tensors are on {', '.join(devices)}", field="tensors")


def _check_apart(tensors: Sequence[torch.Tensor]) -> None:
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, i) for i, tensor in enumerate(tensors))
    for (_, stop, one), (start, _, other) in pairwise(spans):
        if start < stop:
            raise BadRequest(f"tensors {one} and {other} share {stop - start} bytes of memory", field="tensors")
