"""Backends by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker_agent import backend
from worker_agent.backend import PortableWishes
from worker_agent.portable.engines import Finding
from worker_agent.portable.opening import OpenEngine

LLVMPIPE = {"device_name": "llvmpipe (LLVM 15.0.6, 256 bits)", "software": True, "error": 3e-7}
RADEON = {"device_name": "AMD Radeon RX 7800 XT", "error": 4e-7}


def pretend(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=1 << 30))


def wishes(engine: str = "auto", allow_software: bool = False, **findings: dict[str, Any]) -> PortableWishes:
    """A machine on which probes find these; all other engines are absent."""

    def probe(name: str, allow_software: bool) -> Finding:
        return Finding(engine=name, **findings.get(name, {"refusal": "absent"}))

    return PortableWishes(engine=engine, allow_software=allow_software, probe=probe)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Opens engines without a driver; the list says which."""
    names: list[str] = []

    def fake(engine: str, min_flops: int) -> OpenEngine:
        names.append(engine)
        return OpenEngine(
            engine=engine,
            device=torch.device("cpu"),
            device_name=engine,
            software=engine == "torchvulkan",
            fallbacks=lambda: 7,
            memory_bytes=5,
        )

    monkeypatch.setattr(backend, "open_engine", fake)
    return names


def test_auto_prefers_cuda_and_names_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["NVIDIA H200", "NVIDIA L4"])
    for name in ("auto", "cuda"):
        found = backend.resolve(name)
        assert (found.name, found.device, found.gpu_count) == ("cuda", torch.device("cuda", 0), 2)
        assert found.device_names == ("NVIDIA H200", "NVIDIA L4")
    assert backend.resolve("cpu").name == "cpu"


def test_auto_ends_at_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [])
    found = backend.resolve("auto", wishes())
    assert (found.name, found.device, found.gpu_count) == ("cpu", torch.device("cpu"), 0)
    assert found == backend.resolve("cpu")
    assert len(found.device_names) == 1
    assert found.device_names[0]
    assert found.memory_bytes > 1 << 20


def test_auto_takes_the_first_engine_on_a_real_gpu(monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    pretend(monkeypatch, [])
    found = backend.resolve("auto", wishes(xpu={"device_name": "Arc", "error": 0.5}, wgpu_gemm=RADEON, torchvulkan={}))
    assert (found.name, found.gpu_count, found.memory_bytes, found.fallbacks()) == ("wgpu", 1, 5, 7)
    assert found.device_names == ("AMD Radeon RX 7800 XT (wgpu_gemm)",)
    assert opened == ["wgpu_gemm"]


def test_auto_says_aloud_that_a_gpu_can_not_be_used(
    monkeypatch: pytest.MonkeyPatch, opened: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, [])
    assert backend.resolve("auto", wishes(torchvulkan=LLVMPIPE)).name == "cpu"
    assert caplog.text == ""
    assert backend.resolve("auto", wishes(torchvulkan={**RADEON, "error": 0.5})).name == "cpu"
    assert "there is a GPU that can't be used, so this worker computes on the cpu: mps: absent;" in caplog.text
    assert opened == []


def test_auto_never_takes_a_software_driver_even_where_one_is_allowed(
    monkeypatch: pytest.MonkeyPatch, opened: list[str]
) -> None:
    pretend(monkeypatch, [])
    assert backend.resolve("auto", wishes(allow_software=True, torchvulkan=LLVMPIPE)).name == "cpu"
    assert opened == []


def test_auto_asks_no_portable_engine_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch, opened: list[str]) -> None:
    pretend(monkeypatch, ["NVIDIA H200"])
    probed: list[str] = []

    def probe(name: str, allow_software: bool) -> Finding:
        probed.append(name)
        return Finding(engine=name)

    assert backend.resolve("auto", PortableWishes(probe=probe)).name == "cuda"
    assert probed == []


def test_a_software_driver_is_taken_by_name_with_a_warning_and_counts_as_no_gpu(
    opened: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"llvmpipe .* is a software driver.*--allow-software-gpu"):
        backend.resolve("wgpu", wishes(torchvulkan=LLVMPIPE))
    assert opened == []
    found = backend.resolve("wgpu", wishes(allow_software=True, torchvulkan=LLVMPIPE))
    assert (found.name, found.gpu_count) == ("wgpu", 0)
    assert found.device_names == ("llvmpipe (LLVM 15.0.6, 256 bits) (software, torchvulkan)",)
    assert "is a software driver: right, but slower than backend cpu" in caplog.text


def test_the_engine_that_was_named_is_the_only_one(opened: list[str]) -> None:
    backend.resolve("wgpu", wishes(engine="wgpu_gemm", torchvulkan=RADEON, wgpu_gemm=RADEON))
    assert opened == ["wgpu_gemm"]
    with pytest.raises(ValueError, match="wgpu_engine is 'opencl'; it must be one of auto, mps, xpu"):
        backend.resolve("wgpu", wishes(engine="opencl"))


def test_the_processor_is_named_where_linux_says_it() -> None:
    if "model name" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this kernel's /proc/cpuinfo has no model name")
    assert f"model name\t: {backend.resolve('cpu').device_names[0]}\n" in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "backend cuda is not available on this machine: .*; use auto or cpu"),
        (
            "wgpu",
            "backend wgpu is not available on this machine: mps: absent; xpu: absent; torchvulkan: absent; .*doctor",
        ),
        ("rocm", "backend 'rocm' must be one of auto, cuda, wgpu, cpu"),
    ],
)
def test_a_backend_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    pretend(monkeypatch, [])
    with pytest.raises(ValueError, match=message):
        backend.resolve(name, wishes())
