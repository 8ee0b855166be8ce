"""A worker on backend wgpu and one on the CPU keep the bounds of `make equality`, with each engine."""

import json
import subprocess
import sys

import pytest

from tests.support.coordinator import ROOT, environment
from tests.support.portable_training import ENGINES

PROGRAM = str(ROOT / "tests" / "bench" / "equality.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_mixed_run_is_the_run_of_one_process(engine: str):
    command = [sys.executable, PROGRAM, "--backends", "cpu,wgpu", "--wgpu-engine", engine, "--allow-software-gpu"]
    quiet = environment(TORCHVULKAN_PIPELINE_CACHE="0", TORCHVULKAN_STRICT="1")
    ended = subprocess.run([*command, "--steps", "6"], capture_output=True, text=True, env=quiet, timeout=280)
    assert ended.returncode == 0, f"{ended.stderr}\n{ended.stdout}"
    result = json.loads(ended.stdout)
    assert result["ok"]
    assert result["gradient_bytes_equal"]
    assert result["parameter_bytes_equal"]
    assert 0 < result["max_rel_err_float64"] <= 1e-6
    assert result["max_loss_diff"] <= 1e-4
    trained = [case for case in result["cases"] if case["kind"] == "run"]
    assert [case["name"] for case in trained] == ["causal_lm", "flat_lora"]
    for plain, mixed in (case["runs"] for case in trained):
        assert [on["backend"] for on in mixed["workers_on"]] == ["cpu", "wgpu"]
        assert engine in mixed["workers_on"][1]["device"]
        assert mixed["least_part"] > 0
        assert mixed["workers_on"][1]["fallbacks"] == 0
        # The device did compute: it rounds in its own way, and by no more than float32 does.
        assert plain["gradients_sha256"] != mixed["gradients_sha256"]
        assert 0 < mixed["device_rel_err"] < 1e-5
