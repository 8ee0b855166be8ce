"""Probes that crash, hang, lie or find nothing cost a sentence; fallbacks are counted."""

import subprocess
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from worker_agent.portable import probing
from worker_agent.portable.engines import Finding
from worker_agent.portable.fallbacks import FallbackCounter
from worker_agent.portable.probing import choose, probe_in_child

OPERATION = (
    "torchvulkan [WARNING]: A BFloat16 matmul can't run on the Vulkan device. Falling back to CPU. (Triggered x)"
)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that the child imports in torchvulkan's place."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "torchvulkan.py"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("import os; os.abort()", "its probe ended with SIGABRT: it said nothing"),
        ("import sys; sys.exit('the driver is upset')", "its probe ended with exit code 1: the driver is upset"),
        ("raise ImportError('a symbol is missing')", "torchvulkan can't be loaded: a symbol is missing"),
        ("def device_count(): return 0", "there is no Vulkan 1.3 driver with a device"),
    ],
)
def test_whatever_an_engine_does_there_is_a_finding(engine: Path, text: str, refusal: str):
    engine.write_text(text)
    assert probe_in_child("torchvulkan", True) == Finding(engine="torchvulkan", refusal=refusal)


def test_a_driver_that_hangs_is_given_up(engine: Path, monkeypatch: pytest.MonkeyPatch):
    engine.write_text("import threading; threading.Event().wait(50)")
    monkeypatch.setattr(probing, "PROBE_SECONDS", 0.5)
    refusal = probe_in_child("torchvulkan", True).refusal
    assert refusal == "its probe did not end within 0.5 s: its driver hangs, or this machine is too busy"


def test_software_is_named_but_not_tried_where_it_is_not_allowed(engine: Path):
    engine.write_text(
        textwrap.dedent("""
            from types import SimpleNamespace as Device
            def device_count(): return 1
            def get_device_properties(index): return Device(name="llvmpipe", vendor_id=0x10005, total_memory=9)
            def set_device(index): pass
            def is_bf16_supported(): return False
        """)
    )
    choice = choose("torchvulkan", allow_software=False)
    assert choice.taken is None
    assert choice.findings == (Finding(engine="torchvulkan", device_name="llvmpipe", software=True, memory_bytes=9),)
    assert "llvmpipe is a software driver" in choice.reasons()
    # Nothing but a name: training on the device that it claims to have fails.
    [refusal] = choose("torchvulkan", allow_software=True).refusals
    assert refusal.startswith("training a small network on it failed: ")


def test_engines_that_are_not_there_need_no_child(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert probe_in_child("mps", False).refusal == "this torch finds no Apple GPU"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert probe_in_child("wgpu_gemm", False).refusal == "package wgpu is not installed: pip install 'ayni[wgpu]'"


def test_the_first_usable_engine_ends_the_search():
    asked = []

    def probe(name: str, allow_software: bool) -> Finding:
        asked.append(name)
        return Finding(engine=name, device_name="d", error=2.0 if name == "mps" else 1e-7)

    choice = choose("auto", allow_software=False, probe=probe)
    assert choice.taken
    assert (choice.taken.engine, asked) == ("xpu", ["mps", "xpu"])
    assert choice.reasons() == "mps: the probe was wrong by 2.0e+00 on d; at most 0.001 is allowed"
    assert len(choose("auto", allow_software=False, probe=probe, all_of_them=True).findings) == 4


def test_fallbacks_are_counted_and_said_once_and_other_warnings_pass(caplog: pytest.LogCaptureFixture):
    before = torch.is_warn_always_enabled()
    try:
        with warnings.catch_warnings(record=True) as others:
            counter = FallbackCounter()
            for _ in range(3):
                warnings.warn(OPERATION, stacklevel=1)
            warnings.warn("The operator 'aten::x' will fall back to run on the CPU.", stacklevel=1)
            warnings.filterwarnings("always", message="something else")
            warnings.warn("something else", stacklevel=1)
    finally:
        torch.set_warn_always(before)
    assert counter.total == 4
    assert counter.by_kind[OPERATION.partition(" (")[0]] == 3
    assert caplog.text.count("A BFloat16 matmul can't run") == 1
    assert [str(one.message) for one in others] == ["something else"]
