"""Which errors say that a device is gone."""

import pytest

from ayni.errors import Halted
from worker_agent.device_errors import loss_told_by

WGPU = "Validation Error\n\nCaused by:\n  In wgpuQueueWriteBuffer\n    Parent device is lost"
LOST = {
    WGPU: "Parent device is lost",
    "torchvulkan [ERROR]: Wait for fence failed with VkResult -4.": "VkResult -4",
    "vkQueueSubmit: VK_ERROR_DEVICE_LOST": "VK_ERROR_DEVICE_LOST",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)": "UR_RESULT_ERROR_DEVICE_LOST",
    "CUDA error: unspecified launch failure\nCUDA kernel errors might be": "CUDA error: unspecified launch failure",
    "CUDA error: uncorrectable ECC error encountered": "ECC",
    "HIP error: unknown error": "HIP error: unknown error",
    "Discarded (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)": "InnocentVictim",
}
NOT_LOST = (
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "torchvulkan [ERROR]: vkQueueSubmit failed with VkResult -2.",
    "torchvulkan [ERROR]: Out of memory on llvmpipe",
    "kIOGPUCommandBufferCallbackErrorOutOfMemory",
    "unknown error",
    "",
)


@pytest.mark.parametrize("text", LOST)
def test_a_loss_is_told_in_one_line(text: str):
    told = loss_told_by(RuntimeError(text))
    assert LOST[text] in told
    assert "\n" not in told
    assert not told.endswith(".")


@pytest.mark.parametrize("text", NOT_LOST)
def test_what_would_happen_again_is_no_loss(text: str):
    assert loss_told_by(RuntimeError(text)) == ""


def test_an_error_that_a_loss_led_to_counts():
    error = ValueError("the step failed")
    error.__cause__ = RuntimeError(WGPU)
    assert loss_told_by(error) == "Parent device is lost"
    # Chains may be circular.
    error.__cause__.__context__ = error
    assert loss_told_by(error) == "Parent device is lost"


@pytest.mark.parametrize("error", [Halted("worker ant: device is lost"), ConnectionError("device lost")])
def test_what_others_say_is_not_about_this_device(error: Exception):
    assert loss_told_by(error) == ""
