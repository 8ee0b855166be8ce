"""Which devices are real, which is best, which engine is taken."""

import pytest

from worker_agent.portable.engines import Device, Finding, best_device, engines_to_try, refusal_of, title


@pytest.mark.parametrize(
    ("device", "software"),
    [
        (Device(index=0, name="AMD Radeon RX 7800 XT (RADV NAVI32)", vendor_id=0x1002), False),
        (Device(index=0, name="Intel(R) Arc(TM) A770 Graphics (DG2)", vendor_id=0x8086), False),
        (Device(index=0, name="Apple M2", vendor_id=0x106B, adapter_type="IntegratedGPU"), False),
        (Device(index=0, name="unheard of", adapter_type="CPU"), True),
        (Device(index=0, name="unheard of", vendor_id=0x10005), True),
        (Device(index=0, name="unheard of", vendor_id=0x1AE0), True),
        (Device(index=0, name="unheard of", vendor_id=0x1414), True),
        (Device(index=0, name="llvmpipe (LLVM 15.0.6, 256 bits)"), True),
        (Device(index=0, name="Google SwiftShader Device (Subzero)"), True),
        (Device(index=0, name="Microsoft Basic Render Driver"), True),
    ],
    ids=lambda value: value.name if isinstance(value, Device) else "",
)
def test_software_is_known_by_vendor_name_or_adapter_type(device: Device, software: bool):
    assert device.is_software == software


def test_real_devices_come_before_software_and_discrete_ones_before_others():
    devices = [
        Device(index=0, name="llvmpipe", adapter_type="CPU"),
        Device(index=1, name="small", adapter_type="IntegratedGPU"),
        Device(index=2, name="large", adapter_type="DiscreteGPU"),
        Device(index=3, name="large too", adapter_type="DiscreteGPU"),
    ]
    order = []
    while devices:
        best = best_device(devices)
        assert best
        order.append(best.index)
        devices.remove(best)
    assert order == [2, 3, 1, 0]
    assert best_device([]) is None


def test_an_engine_is_refused_for_what_it_is():
    good = Finding(engine="torchvulkan", device_name="RX 7800", error=9e-4)
    assert refusal_of(good, allow_software=False) == ""
    assert title(good) == "RX 7800 (torchvulkan)"
    wrong = Finding(engine="torchvulkan", device_name="RX 7800", error=1e-3)
    assert (
        refusal_of(wrong, allow_software=True) == "the probe was wrong by 1.0e-03 on RX 7800; at most 0.001 is allowed"
    )
    absent = Finding(engine="mps", refusal="this torch finds no Apple GPU")
    assert refusal_of(absent, allow_software=True) == "this torch finds no Apple GPU"


def test_what_is_not_a_number_is_no_small_error():
    assert "wrong by nan" in refusal_of(Finding(engine="xpu", error=float("nan")), allow_software=True)


def test_software_needs_leave():
    software = Finding(engine="wgpu_gemm", device_name="llvmpipe", software=True, error=1e-7)
    assert "--allow-software-gpu" in refusal_of(software, allow_software=False)
    assert refusal_of(software, allow_software=True) == ""
    assert title(software) == "llvmpipe (software, wgpu_gemm)"


def test_engines_are_tried_in_order():
    assert engines_to_try("auto") == ("mps", "xpu", "torchvulkan", "wgpu_gemm")
    assert engines_to_try("xpu") == ("xpu",)
    with pytest.raises(ValueError, match="must be one of auto, mps, xpu, torchvulkan, wgpu_gemm"):
        engines_to_try("cuda")
