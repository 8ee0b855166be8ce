"""What a worker may be told."""

from datetime import timedelta

import pytest

from ayni.settings import SettingsError, from_mapping
from worker_agent.config import WorkerConfig


def test_an_address_is_enough():
    assert WorkerConfig(coordinator="127.0.0.1:1").connect_timeout == timedelta(seconds=60)


def test_the_address_is_required_and_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(SettingsError) as caught:
        from_mapping(WorkerConfig, {"coordinater": "127.0.0.1:1"})
    assert caught.value.problems == (
        "coordinater is not a known name; did you mean coordinator?",
        "coordinator is missing; it has no default",
    )


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("backend", "tpu", "backend is 'tpu'; it must be one of auto, cuda, wgpu, cpu"),
        ("wgpu_engine", "gl", "must be one of auto, mps, xpu, torchvulkan, wgpu_gemm"),
        ("offload_min_flops", -1, "offload_min_flops must be at least 0"),
        ("log_format", "xml", "must be one of text, json"),
        ("log_level", "loud", "must be one of debug, info"),
        ("threads", 0, "threads must be at least 1"),
        ("checkpoint_every", -1, "checkpoint_every at least 0"),
        ("name", "x" * 129, "longer than 128 bytes"),
        ("connect_timeout", timedelta(0), "connect_timeout must be longer than 0 s"),
        ("fetch_timeout", timedelta(0), "fetch_timeout must be longer than 0 s"),
    ],
)
def test_values_out_of_range_are_refused(field, value, words):
    with pytest.raises(ValueError, match=words):
        WorkerConfig(**{"coordinator": "127.0.0.1:1", field: value})
