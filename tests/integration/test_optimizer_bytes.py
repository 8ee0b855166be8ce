"""The host update gives the same bytes at every thread count and vector width.

Each case is a process of its own, since both libraries choose their code paths when they are imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.optimizer_bytes import dispatched

ROOT = Path(__file__).parents[2]
EXPECTED = "7bb60e0947f3d7dd332d433c192f06e9ffe1e3e6bb2d5fac2472934058455458"
"""Hash that every processor must give; changes only with the arithmetic itself."""

SUPPORTED = dispatched()
CASES = {
    "numpy": (0, {}),
    "numpy without its widest": (0, {"NPY_DISABLE_CPU_FEATURES": " ".join(SUPPORTED[1:])}),
    "numpy without dispatch": (0, {"NPY_DISABLE_CPU_FEATURES": " ".join(SUPPORTED)}),
    "all at once": (1, {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": " ".join(SUPPORTED)}),
    "torch avx2, two threads": (2, {"ATEN_CPU_CAPABILITY": "avx2"}),
    "torch avx512, four threads": (4, {"ATEN_CPU_CAPABILITY": "avx512"}),
}
"""Threads (0: without torch) and environment of each process."""


def outcome(threads: int, environment: dict[str, str]) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.support.optimizer_bytes", str(threads)]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]),
        "OMP_NUM_THREADS": str(threads),
        **{name: value for name, value in environment.items() if value},
    }
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_the_same_everywhere(case: str) -> None:
    threads, environment = CASES[case]
    result = outcome(threads, environment)
    assert result["host"] == EXPECTED
    disabled = environment.get("NPY_DISABLE_CPU_FEATURES", "").split()
    assert not set(disabled) & set(result["numpy"])  # type: ignore[call-overload]
    if environment.get("ATEN_CPU_CAPABILITY") == "default":
        assert result["torch"] == "DEFAULT"
