"""Tensors of an engine as layouts: the same bytes, and the refusals."""

import numpy as np
import pytest
import torch

from ayni.blocks.layouts import LayoutConfig, LayoutKind, StorageKind
from ayni.errors import BadRequest
from tests.support.block_layouts import FC, HND, LS_FIRST, LS_SECOND, NHD, UNIVERSAL, geometry
from worker_agent.blocks.device_memory import DeviceMemory
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import WHOLE
from worker_agent.blocks.patterns import RankDistinct, fill
from worker_agent.blocks.tensors import paged_cache_geometry, register_tensors

B, L, T, H, D = 7, 3, 4, 5, 6
SHAPES = {
    (FC, NHD): (B, L, 2, T, H, D),
    (FC, HND): (B, L, 2, H, T, D),
    (FC, UNIVERSAL): (B, H, L, 2, T, D),
    (LS_FIRST, NHD): (B, 2, T, H, D),
    (LS_FIRST, HND): (B, 2, H, T, D),
    (LS_SECOND, NHD): (2, B, T, H, D),
    (LS_SECOND, HND): (2, B, H, T, D),
}
AXES = {NHD: "LOTHD", HND: "LOHTD", UNIVERSAL: "HLOTD"}


def cache(shape: tuple[int, ...], kind: LayoutKind, dtype=torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(1 if kind is FC else L)]


@pytest.mark.parametrize(("kind", "order"), list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_a_paged_cache_is_the_layout_that_its_shape_says(kind, order, dtype):
    found = paged_cache_geometry(cache(SHAPES[kind, order], kind, dtype), order)
    config = LayoutConfig(
        num_blocks=B,
        num_layers=L,
        outer_dim=2,
        page_size=T,
        inner_dim=H * D,
        num_heads=H,
        dtype_width_bytes=dtype.itemsize,
    )
    assert found == Geometry(config=config, kind=kind, axis_order=order)


@pytest.mark.parametrize(("kind", "order"), list(SHAPES))
def test_blocks_are_what_indexing_the_tensors_gives(kind, order):
    tensors = cache(SHAPES[kind, order], kind)
    memory = register_tensors(tensors, paged_cache_geometry(tensors, order))
    assert isinstance(memory, HostMemory)
    blocks = np.array([6, 0, 3])
    out = np.empty((3, memory.geometry.config.block_bytes), np.uint8)
    memory.read(blocks, WHOLE, out)
    for row, block in zip(out, blocks.tolist(), strict=True):
        one = tensors[0][block] if kind is FC else torch.stack([layer_of(t, kind)[block] for t in tensors])
        assert row.tobytes() == one.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("kind", "order"), list(SHAPES))
def test_what_is_written_is_in_the_tensors_at_once(kind, order):
    tensors = cache(SHAPES[kind, order], kind)
    memory = register_tensors(tensors, paged_cache_geometry(tensors, order))
    before = [tensor.clone() for tensor in tensors]
    fill(memory, [2], RankDistinct(0))
    for tensor, old in zip(tensors, before, strict=True):
        views = [t.view(torch.int16) if kind is FC else layer_of(t, kind).view(torch.int16) for t in (tensor, old)]
        others = [block for block in range(B) if block != 2]
        assert torch.equal(views[0][others], views[1][others])
        assert not torch.equal(views[0][2], views[1][2])
    tensors[0].zero_()
    assert not memory.buffers[0].any()


def layer_of(tensor: torch.Tensor, kind: LayoutKind) -> torch.Tensor:
    """One layer with blocks in front."""
    return tensor.transpose(0, 1) if kind is LS_SECOND else tensor


def test_fused_keys_and_values_are_one_outer_part():
    fused = paged_cache_geometry([torch.zeros(B, T, H, D) for _ in range(L)])
    assert (fused.kind, fused.config.outer_dim, fused.config.num_heads) == (LS_FIRST, 1, H)
    latent = paged_cache_geometry([torch.zeros(B, T, D) for _ in range(L)])
    assert (latent.config.outer_dim, latent.config.num_heads, latent.config.inner_dim) == (1, 1, D)
    register_tensors([torch.zeros(B, T, D) for _ in range(L)], latent)


def test_layers_of_one_tensor_may_lie_side_by_side():
    whole = torch.randn(L, 2, B, T, H, D)
    layers = list(whole.unbind(0))
    memory = register_tensors(layers, paged_cache_geometry(layers))
    assert memory.geometry.kind is LS_SECOND
    fill(memory, range(B), RankDistinct(0))
    assert [bytes(buffer) for buffer in memory.buffers] == [layer.numpy().tobytes() for layer in layers]


def test_flat_memory_is_a_layout_of_any_kind():
    for kind in LayoutKind:
        of = geometry(kind)
        tensors = [torch.zeros(size // 2, dtype=torch.int16) for size in of.allocation_bytes]
        memory = register_tensors(tensors, of)
        assert memory.storage is StorageKind.SYSTEM
        fill(memory, [1], RankDistinct(0))
        assert any(tensor.any() for tensor in tensors)


def test_parameters_can_be_registered():
    of = geometry(dtype_width_bytes=4)
    parameter = torch.nn.Parameter(torch.zeros(of.config.total_bytes // 4))
    fill(register_tensors([parameter], of), [0], RankDistinct(0))
    assert parameter.detach().any()


def test_two_blocks_of_two_parts_need_to_be_told_apart():
    tensors = [torch.zeros(2, 2, T, H, D)]
    with pytest.raises(BadRequest, match="fit two kinds; say which"):
        paged_cache_geometry(tensors)
    assert paged_cache_geometry(tensors, kind=LS_SECOND).kind is LS_SECOND


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(3, B, T, H, D)], "fit no kind of layout"),
        ([torch.zeros(B, T)], "fit no kind of layout"),
        ([torch.zeros(2, B, T, H, D), torch.zeros(2, B, T, H, D + 1)], "layers of one shape and dtype"),
        ([torch.zeros(2, B, T, H, D), torch.zeros(2, B, T, H, D).half()], "layers of one shape and dtype"),
        ([], "layers of one shape and dtype"),
    ],
)
def test_caches_of_other_shapes_are_refused(tensors, message):
    with pytest.raises(BadRequest, match=message):
        paged_cache_geometry(tensors)


def test_a_kind_that_the_shape_is_not_is_refused():
    with pytest.raises(BadRequest, match="no fully_contiguous layout"):
        paged_cache_geometry([torch.zeros(2, B, T, H, D)], kind=FC)


def layers(**changes) -> list[torch.Tensor]:
    return [torch.zeros(B, 2, T, H, 3, dtype=torch.int16, **changes) for _ in range(L)]


SIZE = geometry(LS_FIRST).allocation_bytes[0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (layers()[:2], "needs 3 tensors; got 2"),
        (
            [*layers()[:2], torch.zeros(SIZE // 2 - 1, dtype=torch.int16)],
            f"tensor 2 needs {SIZE} bytes; it has {SIZE - 2}",
        ),
        (
            [*layers()[:2], torch.zeros(SIZE // 2 + 1, dtype=torch.int16)],
            f"tensor 2 needs {SIZE} bytes; it has {SIZE + 2}",
        ),
        ([*layers()[:2], torch.zeros(SIZE)], "tensor 2 has elements of 4 bytes; the layout has 2"),
        ([*layers()[:2], torch.zeros(2, B, T, H, 3, dtype=torch.int16)], r"does not begin with \(7, 2\)"),
        ([*layers()[:2], torch.zeros(B, 2, T, 3, H, dtype=torch.int16).transpose(3, 4)], "tensor 2 is not contiguous"),
        ([*layers()[:2], torch.zeros(1, 2, T, H, 3, dtype=torch.int16).expand(B, 2, T, H, 3)], "is not contiguous"),
        ([*layers()[:2], torch.zeros(B, 2, T, H, 3, dtype=torch.int16).to_sparse()], "is not contiguous"),
        ([*layers()[:2], layers(device="meta")[0]], "is not contiguous"),
    ],
)
def test_tensors_that_are_not_the_layout_are_refused(tensors, message):
    with pytest.raises(BadRequest, match=message):
        register_tensors(tensors, geometry(LS_FIRST))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64], ids=["conjugated", "negated"])
def test_views_whose_bytes_are_not_their_values_are_refused(dtype):
    of = geometry(dtype_width_bytes=8)
    tensor = torch.zeros(of.config.total_bytes // 8, dtype=dtype)
    register_tensors([tensor], of)
    view = tensor.conj() if dtype.is_complex else torch._neg_view(tensor)
    with pytest.raises(BadRequest, match="tensor 0 is a conjugated or negated view"):
        register_tensors([view], of)


def test_tensors_that_share_bytes_are_refused():
    one = torch.zeros(SIZE, dtype=torch.int16)
    first, second = one[: SIZE // 2], one[SIZE // 2 - 3 :][: SIZE // 2]
    with pytest.raises(BadRequest, match="tensors 0 and 2 share 6 bytes of memory"):
        register_tensors([first, layers()[0], second], geometry(LS_FIRST))
    same = layers()[0]
    with pytest.raises(BadRequest, match=f"share {SIZE} bytes"):
        register_tensors([same, same, layers()[0]], geometry(LS_FIRST))
    beside = [one[: SIZE // 2], one[SIZE // 2 :], layers()[0]]
    register_tensors(beside, geometry(LS_FIRST))


def test_memory_that_is_not_aligned_is_refused():
    room = torch.zeros(SIZE + 64, dtype=torch.int16)
    start = -(room.data_ptr() // 2) % 32
    good = [room[start : start + SIZE // 2]]
    of = geometry(LS_FIRST, num_layers=1, alignment_bytes=64)
    register_tensors(good, of)
    with pytest.raises(BadRequest, match="tensor 0 is not aligned to 64 bytes"):
        register_tensors([room[start + 1 : start + 1 + SIZE // 2]], of)


def test_several_devices_are_refused(monkeypatch):
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 1)

    odd = layers()[0].as_subclass(Elsewhere)
    with pytest.raises(BadRequest, match="on one device; these tensors are on cpu, cuda:1"):
        register_tensors([*layers()[:2], odd], geometry(LS_FIRST))


def test_the_tensors_are_kept_as_long_as_the_layout():
    memory = register_tensors(layers(), geometry(LS_FIRST))
    fill(memory, range(B), RankDistinct(0))
    others = [torch.ones(SIZE, dtype=torch.int16) for _ in range(8)]
    assert not any((buffer[:8] == 1).all() for buffer in memory.buffers)
    assert others
    memory.close()


def test_buffers_on_a_device_are_checked_too():
    of = geometry(LS_FIRST)
    with pytest.raises(BadRequest, match=f"allocation 1 needs {SIZE} bytes; it has 5"):
        DeviceMemory(of, [torch.zeros(5 if i == 1 else SIZE, dtype=torch.uint8) for i in range(3)])


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_a_device_layout_works_at_any_offset_of_its_memory(offset):
    of = geometry()
    host = allocate_host(of)
    fill(host, range(B), RankDistinct(0))
    room = torch.zeros(of.config.total_bytes + 8, dtype=torch.uint8)
    device = DeviceMemory(of, [room[offset : offset + of.config.total_bytes]])
    data = host.rows(WHOLE)
    assert data is not None
    data.setflags(write=False)
    device.write(np.arange(B), WHOLE, data)
    assert room[offset : offset + of.config.total_bytes].numpy().tobytes() == data.tobytes()
    assert not room[:offset].any()
    out = np.zeros((2, of.config.block_bytes + 0), np.uint8)
    device.read(np.array([5, 1]), WHOLE, out)
    np.testing.assert_array_equal(out, data[[5, 1]])
    assert device.rows(WHOLE) is None
    assert device.views(0, WHOLE) is None


def test_pinned_memory_is_pageable_where_nothing_gains_by_it():
    storage = StorageKind.PINNED if torch.cuda.is_available() else StorageKind.SYSTEM
    memory = allocate_host(geometry(alignment_bytes=4096), pinned=True)
    assert memory.storage is storage
    assert not memory.buffers[0].any()
    assert memory.buffers[0].ctypes.data % 4096 == 0
