"""Each engine trains what the CPU trains, on the device, and the same again to the bit.

Sums are short here on purpose: Mesa's software driver ends a shader after 65,535 turns of its loops, without a word, so
nothing that is summed over may be longer than 16,384.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.coordinator import ROOT, environment
from tests.support.portable_training import ENGINES

BOUND = 1e-4
DRIVER = (
    "no engine on a Vulkan driver; on Debian: apt-get install mesa-vulkan-drivers libvulkan1, and in the virtual "
    "environment: pip install 'ayni[wgpu]'"
)
QUIET = {"TORCHVULKAN_STRICT": "1", "TORCHVULKAN_PIPELINE_CACHE": "0"}
"""An operator that is missing altogether raises; nothing is written to the home folder."""


def train(engine: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "error", "-m", "tests.support.portable_training", engine, str(folder)]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=environment(**QUIET), cwd=ROOT, timeout=200, check=False
    )
    assert ended.returncode == 0, f"{DRIVER}\n{ended.stderr}"
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=ENGINES)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(request.param, tmp_path_factory.mktemp("files")) | {"engine": request.param}


@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_training_agrees_with_the_cpu(result: dict[str, Any], task: str):
    found = result[task]
    assert found["loss_error"] <= BOUND
    assert found["gradient_error"] <= BOUND
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_the_device_is_about_as_exact_as_the_cpu(result: dict[str, Any], task: str):
    found = result[task]
    assert 0 < found["gradient_error_float64"] <= 8 * found["cpu_gradient_error_float64"] + 1e-7


@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_a_rerun_gives_the_same_bytes(result: dict[str, Any], task: str):
    assert result[task]["bitwise_again"]


@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_it_is_the_device_that_computes(result: dict[str, Any], task: str):
    if result["engine"] == "torchvulkan":
        assert result[task]["devices"] == ["vulkan"]
    else:
        after_forward, after_backward = result[task]["products"]
        assert 0 < after_forward < after_backward


def test_nothing_falls_back_to_the_cpu_and_fallbacks_would_be_seen(result: dict[str, Any]):
    assert result["fallbacks"] == 0
    assert result["fallbacks_with_bfloat16"] > 0


@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_only_what_is_trained_changes_and_saving_takes_it_from_the_device(result: dict[str, Any], task: str):
    assert result[task]["frozen_unchanged"]
    assert result[task]["learned_changed"]
    assert result[task]["saved_equal"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_cuda_agrees_with_the_cpu(tmp_path: Path, task: str):
    found = train("cuda", tmp_path)[task]
    assert found["loss_error"] <= BOUND
    assert found["gradient_error"] <= BOUND
    assert found["devices"] == ["cuda"]
    assert found["losses"][-1] < found["losses"][0]


def test_the_environment_names_no_driver_that_is_not_there():
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        missing = [path for path in os.environ.get(name, "").split(os.pathsep) if path and not Path(path).exists()]
        assert not missing, f"{name} names {missing}"
