"""Products on a GPU through wgpu are those of the CPU, whatever the shapes, strides and cuts.

In this process, because wgpu, unlike torchvulkan, changes nothing of torch.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from worker_agent.portable.gemm_device import GemmDevice
from worker_agent.portable.gemm_mode import GemmMode
from worker_agent.portable.gemm_plan import K_PART


@pytest.fixture(scope="module")
def device() -> GemmDevice:
    return GemmDevice.open_best()


@pytest.fixture
def mode(device: GemmDevice) -> Iterator[GemmMode]:
    with GemmMode(device, min_flops=0) as entered:
        yield entered


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def error(own: Tensor, exact: Tensor) -> float:
    return float((own.double() - exact).abs().max() / exact.abs().max())


LEFT = {
    "rows": lambda m, k: drawn(m, k),
    "columns": lambda m, k: drawn(k, m).t(),
    "every other": lambda m, k: drawn(m, 2 * k)[:, ::2],
    "in the middle": lambda m, k: drawn(m + 2, k)[1:-1],
}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("right", LEFT)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (64, 16, 64), (65, 17, 63), (3, 200, 130)])
def test_every_layout_of_the_operands(device: GemmDevice, left: str, right: str, m: int, k: int, n: int):
    a, b = LEFT[left](m, k), LEFT[right](k, n)
    own = device.multiply(a.unsqueeze(0), b.unsqueeze(0))[0]
    assert own.shape == (m, n)
    assert error(own, a.double() @ b.double()) < 2e-6


@pytest.mark.parametrize("k", [K_PART, K_PART + 1, 70_000])
def test_long_sums_are_cut_before_the_driver_ends_the_shader(device: GemmDevice, k: int):
    a, b = drawn(1, 8, k), drawn(1, k, 8)
    assert error(device.multiply(a, b), a.double() @ b.double()) < 1e-5


def test_batches_and_parts(device: GemmDevice, monkeypatch: pytest.MonkeyPatch):
    a, b = drawn(5, 90, 40), drawn(5, 70, 40).transpose(1, 2)
    whole = device.multiply(a, b)
    assert error(whole, a.double() @ b.double()) < 2e-6
    monkeypatch.setattr(device, "most_bytes", 4096)
    assert torch.equal(device.multiply(a, b), whole)


def test_modules_are_computed_there_forward_and_backward(mode: GemmMode):
    layer, inputs = torch.nn.Linear(20, 12), drawn(30, 20).requires_grad_()
    layer(inputs).square().sum().backward()
    assert mode.num_products == 3
    assert mode.num_flops == 3 * 2 * 30 * 20 * 12
    exact = layer.double()
    copy = inputs.detach().double().requires_grad_()
    exact.zero_grad()
    exact(copy).square().sum().backward()
    assert inputs.grad is not None
    assert copy.grad is not None
    assert error(inputs.grad, copy.grad) < 2e-6
    assert mode.num_products == 3


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (0.5, 2)])
def test_what_is_added_is_scaled(mode: GemmMode, beta: float, alpha: float):
    added, a, b = drawn(7), drawn(9, 5), drawn(5, 7)
    expected = beta * added.double() + alpha * (a.double() @ b.double())
    assert error(torch.addmm(added, a, b, beta=beta, alpha=alpha), expected) < 2e-6
    assert mode.num_products == 1


def test_small_products_stay_and_other_types_are_counted(device: GemmDevice):
    with GemmMode(device, min_flops=1000) as mode:
        drawn(4, 4) @ drawn(4, 4)
        drawn(10, 10).bfloat16() @ drawn(10, 10).bfloat16()
        assert (mode.num_products, mode.num_fallbacks) == (0, 1)
        drawn(10, 10) @ drawn(10, 10)
        assert (mode.num_products, mode.num_fallbacks) == (1, 1)
    drawn(10, 10) @ drawn(10, 10)
    assert mode.num_products == 1


def test_buffers_are_used_again(device: GemmDevice):
    a, b = drawn(1, 100, 100), drawn(1, 100, 100)
    device.multiply(a, b)
    kept = {key: len(buffers) for key, buffers in device._spare.items()}
    for rows in (100, 97, 101):
        device.multiply(a[:, :rows], b)
    assert {key: len(buffers) for key, buffers in device._spare.items()} == kept
