"""Backends by name."""

from pathlib import Path

import pytest
import torch

from worker_agent import backend


def pretend(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])


def test_auto_prefers_cuda_and_names_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ["NVIDIA H200", "NVIDIA L4"])
    for name in ("auto", "cuda"):
        found = backend.resolve(name)
        assert (found.name, found.device, found.gpu_count) == ("cuda", torch.device("cuda", 0), 2)
        assert found.device_names == ("NVIDIA H200", "NVIDIA L4")
    assert backend.resolve("cpu").name == "cpu"


def test_auto_passes_wgpu_over_and_ends_at_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, [])
    found = backend.resolve("auto")
    assert (found.name, found.device, found.gpu_count) == ("cpu", torch.device("cpu"), 0)
    assert found == backend.resolve("cpu")
    assert len(found.device_names) == 1
    assert found.device_names[0]


def test_the_processor_is_named_where_linux_says_it() -> None:
    if "model name" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this kernel's /proc/cpuinfo has no model name")
    assert f"model name\t: {backend.resolve('cpu').device_names[0]}\n" in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "backend cuda is not available on this machine: .*; use auto or cpu"),
        ("wgpu", "backend wgpu is not available in this version; use auto, cuda or cpu"),
        ("rocm", "backend 'rocm' must be one of auto, cuda, wgpu, cpu"),
    ],
)
def test_a_backend_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    pretend(monkeypatch, [])
    with pytest.raises(ValueError, match=message):
        backend.resolve(name)
