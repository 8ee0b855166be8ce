"""Addresses of NIXL requests against copies made block by block with numpy."""

import numpy as np
import pytest

from ayni.blocks.layouts import Axis, AxisOrder, LayoutConfig, LayoutKind
from ayni.blocks.transfers import AxisSlice
from ayni.errors import IncompatibleLayout
from worker_agent.blocks.engines import nixl_descriptors
from worker_agent.blocks.engines.nixl_agent import NixlSettings, with_tcp
from worker_agent.blocks.engines.nixl_descriptors import Copies, side_of, strings_of
from worker_agent.blocks.engines.nixl_envelope import Regions
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.host_memory import HostMemory, allocate_host
from worker_agent.blocks.memory import Part

CONFIG = LayoutConfig(num_blocks=6, num_layers=3, outer_dim=2, page_size=4, inner_dim=10, num_heads=5)
FC, BLOCK_FIRST, BLOCK_SECOND = LayoutKind
HEADS = AxisSlice(axis=Axis.HEAD_COUNT, start=1, stop=4)


def memory(kind: LayoutKind, order: AxisOrder, seed: int) -> HostMemory:
    result = allocate_host(Geometry(config=CONFIG, kind=kind, axis_order=order))
    for number, buffer in enumerate(result.buffers):
        buffer[:] = np.random.default_rng([seed, number]).integers(0, 256, buffer.size, np.uint8)
    return result


def regions(of: HostMemory, base: int) -> Regions:
    """Pretends that allocation i lies at base + i * 2**20."""
    places = tuple((base + (number << 20), buffer.nbytes) for number, buffer in enumerate(of.buffers))
    return Regions(is_device=False, ordinal=3, allocations=places)


def carry_out(copies: Copies, remote: HostMemory, local: HostMemory, remote_ids: np.ndarray, ids: np.ndarray) -> None:
    """Copies from remote to local what the descriptors say."""
    pairs = zip(copies.remote(remote_ids).tolist(), copies.local(ids).tolist(), strict=True)
    for (source, source_length, ordinal), (target, length, _) in pairs:
        assert (source_length, ordinal) == (length, 3)
        one, other = source - (1 << 40), target - (2 << 40)
        data = remote.buffers[one >> 20][one & 0xFFFFF :][:length]
        assert len(data) == length
        local.buffers[other >> 20][other & 0xFFFFF :][:length] = data


@pytest.mark.parametrize("part", [Part(), Part(layers=(1, 3)), Part(slice=HEADS), Part(layers=(0, 1), slice=HEADS)])
@pytest.mark.parametrize("kinds", [(FC, FC), (FC, BLOCK_SECOND), (BLOCK_FIRST, FC), (BLOCK_SECOND, BLOCK_FIRST)])
@pytest.mark.parametrize("order", [AxisOrder.NHD, AxisOrder.HND])
def test_descriptors_copy_what_reading_and_writing_parts_would(kinds, part, order):
    remote, local, expected = memory(kinds[0], order, 1), memory(kinds[1], order, 2), memory(kinds[1], order, 2)
    remote_ids, ids = np.array([5, 0, 2]), np.array([1, 4, 3])
    copies = Copies(
        side_of(remote.geometry, part, regions(remote, 1 << 40)), side_of(local.geometry, part, regions(local, 2 << 40))
    )
    carry_out(copies, remote, local, remote_ids, ids)
    data = np.empty((3, remote.geometry.part_bytes(part.layers, part.slice, None)), np.uint8)
    assert copies.block_bytes == data.shape[1]
    remote.read(remote_ids, part, data)
    expected.write(ids, part, data)
    for found, right in zip(local.buffers, expected.buffers, strict=True):
        assert np.array_equal(found, right)


def test_whole_blocks_are_one_descriptor_each():
    remote, local = memory(FC, AxisOrder.NHD, 1), memory(FC, AxisOrder.NHD, 2)
    copies = Copies(
        side_of(remote.geometry, Part(), regions(remote, 1 << 40)),
        side_of(local.geometry, Part(), regions(local, 2 << 40)),
    )
    size = CONFIG.block_bytes
    assert copies.remote(np.array([4, 1])).tolist() == [[(1 << 40) + 4 * size, size, 3], [(1 << 40) + size, size, 3]]


def test_strings_follow_one_another():
    remote = memory(BLOCK_FIRST, AxisOrder.NHD, 1)
    size = CONFIG.block_bytes
    buffer = Regions(is_device=False, allocations=((2 << 40, 3 * size),))
    copies = Copies(side_of(remote.geometry, Part(), regions(remote, 1 << 40)), strings_of(size, buffer))
    rows = copies.local(np.arange(3))
    assert rows[:, 1].sum() == 3 * size
    assert np.array_equal(rows[1:, 0], rows[:-1, 0] + rows[:-1, 1])


def test_requests_are_kept_short(monkeypatch):
    remote = memory(FC, AxisOrder.NHD, 1)
    side = side_of(remote.geometry, Part(), regions(remote, 1 << 40))
    monkeypatch.setattr(nixl_descriptors, "REQUEST_BYTES", 3 * CONFIG.block_bytes + 1)
    assert Copies(side, side).num_blocks == 3
    monkeypatch.setattr(nixl_descriptors, "REQUEST_BYTES", 1)
    assert Copies(side, side).num_blocks == 1
    monkeypatch.setattr(nixl_descriptors, "REQUEST_BYTES", 1 << 30)
    monkeypatch.setattr(nixl_descriptors, "MOST_DESCRIPTORS", 5)
    assert Copies(side, side).num_blocks == 5


def test_parts_of_unlike_size_are_refused():
    remote = memory(FC, AxisOrder.NHD, 1)
    whole, part = (side_of(remote.geometry, what, regions(remote, 1 << 40)) for what in (Part(), Part(layers=(0, 1))))
    with pytest.raises(IncompatibleLayout):
        Copies(whole, part)


def test_variables_that_are_set_stay_and_tcp_is_always_there():
    environ = {"UCX_TCP_TX_SEG_SIZE": "8k"}
    NixlSettings(devices="eth0", transports="rc,cuda").apply(environ)
    assert environ == {
        "UCX_TCP_TX_SEG_SIZE": "8k",
        "UCX_TCP_RX_SEG_SIZE": "256k",
        "UCX_NET_DEVICES": "eth0",
        "UCX_TLS": "rc,cuda,tcp",
    }
    environ = {}
    NixlSettings().apply(environ)
    assert set(environ) == {"UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"}
    assert [with_tcp(names) for names in ("", "tcp", "all", "^cuda", "self,tcp")] == [
        "",
        "tcp",
        "all",
        "^cuda",
        "self,tcp",
    ]
