"""The doctor's sentences, verdict and JSON."""

from dataclasses import replace

import pytest

from worker_agent.doctor_config import DoctorConfig
from worker_agent.doctor_report import Findings, Link, as_json_values, exit_is_good, lines
from worker_agent.portable.engines import Finding

RADEON = Finding(
    engine="torchvulkan", device_name="AMD Radeon RX 7800 XT", error=4.2e-7, memory_bytes=16 << 30, seconds=2.34
)
NOTHING = Findings(
    asked="auto",
    system="Python 3.11.7, torch 2.13.0+cpu, Linux x86_64",
    processor="AMD EPYC",
    host_memory_bytes=24 << 30,
    no_cuda="this build of torch (2.13.0+cpu) has no CUDA",
    engines=(Finding(engine="mps"), Finding(engine="xpu")),
    refusals=("this torch finds no Apple GPU", "this torch finds no Intel GPU"),
)
WITH_RADEON = replace(NOTHING, engines=(*NOTHING.engines, RADEON), refusals=(*NOTHING.refusals, ""))
LINK = Link(coordinator="ant:7000", run_id="bbc", round_trip_s=0.0012, out_bytes_per_s=50e6, in_bytes_per_s=12.5e6)


def text(found: Findings) -> str:
    return "\n".join(lines(found))


def test_a_machine_without_gpu_computes_on_the_cpu_unless_another_backend_was_asked_for():
    assert NOTHING.chosen == "cpu"
    assert exit_is_good(NOTHING)
    assert "computes on the cpu, because there is neither a CUDA device nor another GPU" in text(NOTHING)
    assert "    mps          no: this torch finds no Apple GPU" in text(NOTHING)
    for asked in ("cuda", "wgpu"):
        refused = replace(NOTHING, asked=asked)
        assert not exit_is_good(refused)
        assert f"A worker can't start here with --backend {asked}." in text(refused)
        assert as_json_values(refused)["chosen"] is None


def test_a_gpu_is_described_with_what_was_tried():
    assert WITH_RADEON.chosen == "wgpu"
    said = text(WITH_RADEON)
    assert (
        "    torchvulkan  AMD Radeon RX 7800 XT, 16.0 GiB, float32; a training step is within 4e-07 of the CPU's "
        "(tried in 2.3 s)"
    ) in said
    assert "on wgpu: AMD Radeon RX 7800 XT (torchvulkan), because mps and xpu can't be used." in said
    assert text(replace(WITH_RADEON, asked="cpu")).endswith("A worker computes on the cpu, as asked for.")


def test_cuda_comes_first():
    found = replace(WITH_RADEON, no_cuda="", cuda_devices=("NVIDIA H200",))
    assert found.chosen == "cuda"
    assert text(found).endswith("A worker computes on cuda (NVIDIA H200).")
    assert replace(found, asked="wgpu").chosen == "wgpu"


def test_software_and_fallbacks_are_not_kept_quiet():
    software = replace(RADEON, device_name="llvmpipe", software=True, fallbacks=3)
    found = replace(NOTHING, asked="wgpu", engines=(software,), refusals=("",))
    assert "llvmpipe, software, 16.0 GiB" in text(found)
    assert "3 operations fell back to the CPU" in text(found)
    assert text(found).endswith("This is a software driver: right, but slower than backend cpu.")


def test_rates_are_said_in_times_that_matter():
    said = text(replace(NOTHING, link=LINK))
    assert "Coordinator at ant:7000, run bbc:\n  a call and its answer take 1.20 ms" in said
    assert "  out      50.0 MB/s: 100 MB of gradients take 2.0 s" in said
    assert "  in       12.5 MB/s: 100 MB of gradients take 8.0 s" in said


@pytest.mark.parametrize(
    ("link", "good", "said"),
    [
        (LINK, True, "50.0 MB/s"),
        (replace(LINK, out_bytes_per_s=None, problem="too old"), True, "rates are not known: too old"),
        (Link(coordinator="ant:7000", problem="nobody answers"), False, "Coordinator at ant:7000: nobody answers"),
    ],
)
def test_a_coordinator_that_does_not_answer_is_a_failure(link: Link, good: bool, said: str):
    found = replace(NOTHING, link=link)
    assert exit_is_good(found) == good
    assert said in text(found)


def test_machines_get_the_same():
    found = as_json_values(replace(WITH_RADEON, link=LINK))
    assert (found["ok"], found["chosen"], found["engine"]) == (True, "wgpu", "torchvulkan")
    assert [engine["usable"] for engine in found["backends"]["wgpu"]["engines"]] == [False, False, True]
    assert found["link"]["in_bytes_per_s"] == 12.5e6
    assert found["why"] in text(WITH_RADEON)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"backend": "tpu"}, "backend is 'tpu'"), ({"wgpu_engine": "gl"}, "wgpu_engine is 'gl'; it must be one of auto")],
)
def test_wrong_use_is_said(wrong: dict, said: str):
    with pytest.raises(ValueError, match=said):
        DoctorConfig(**wrong)
