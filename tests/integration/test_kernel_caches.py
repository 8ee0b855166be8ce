"""Loops that are compiled by processes which share a cache, can't write one, or find a damaged one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import hashlib, sys
import numpy as np
from ayni.kernels import loading
from ayni.kernels.current import kernels
sys.stdin.read()
loading.choose("compiled")
values = np.random.default_rng(7).standard_normal(1 << 16).astype(np.float32)
halves = np.empty(values.size, np.uint16)
kernels().to_bfloat16(values, halves)
print(kernels().name, hashlib.sha256(halves.tobytes()).hexdigest())
"""
_SECONDS = 120.0


def _begin(cache: str) -> "subprocess.Popen[str]":
    """Starts a process that compiles when its standard input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "NUMBA_CACHE_DIR": cache, "AYNI_KERNELS": ""},
    )


def _said(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=_SECONDS)
    assert process.returncode == 0, err
    return out


def test_processes_that_compile_at_once_share_a_cache(tmp_path):
    processes = [_begin(str(tmp_path / "cache")) for _ in range(2)]
    for process in processes:
        assert process.stdin
        process.stdin.close()
        process.stdin = None
    first, second = (_said(process) for process in processes)
    assert first == second
    assert "numba" in first
    assert list((tmp_path / "cache").rglob("*.nbi")), "what was compiled is kept"
    assert _said(_begin(str(tmp_path / "cache"))) == first


@pytest.mark.parametrize("damage", [b"", b"no cache at all", bytes(range(256)) * 16])
def test_a_damaged_cache_is_compiled_around(tmp_path, damage):
    cache = tmp_path / "cache"
    whole = _said(_begin(str(cache)))
    for path in [*cache.rglob("*.nbi"), *cache.rglob("*.nbc")]:
        path.write_bytes(damage)
    assert _said(_begin(str(cache))) == whole


def test_a_cache_that_can_not_be_written_is_done_without(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert "numba" in _said(_begin(str(blocked / "cache")))
