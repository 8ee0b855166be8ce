"""A real device that is lost in the middle of a real run: wgpu destroys it, and says what it says after a reset."""

from pathlib import Path

from ayni.process import TEMPORARY
from tests.support.agents import agent, module
from tests.support.coordinator import coordinator

NUM_STEPS = 60
DESTROYS = """
import gc
import os
from tests.support.toy_task import ToyTask
from worker_agent.portable.gemm_device import GemmDevice

class FragileTask(ToyTask):
    batches = 0

    def batch(self, indices, split):
        self.batches += 1
        # In the first step: later ones may leave a slow device without a part.
        if self.batches == 2:
            for device in [found for found in gc.get_objects() if isinstance(found, GemmDevice)]:
                device._device.destroy()
        return super().batch(indices, split)
"""


def test_a_worker_whose_device_is_destroyed_leaves_and_the_other_one_finishes(tmp_path: Path):
    own = module(tmp_path / "own", DESTROYS)
    run = {
        "run_id": "lost",
        "num_steps": NUM_STEPS,
        "min_workers": 1,
        "start_workers": 2,
        "task": {"name": "own_task:FragileTask"},
        "batch": {"samples": 10, "microbatches": 5},
        # Whoever waited for the lost worker would wait longer than this test may take.
        "timeouts": {"shutdown": "10s", "lease": "200s", "accept": "300s"},
        "stragglers": {"shortest": "200s", "longest": "200s"},
    }
    flags = ("--backend", "wgpu", "--allow-software-gpu", "--wgpu-engine", "wgpu_gemm", "--offload-min-flops", "0")
    with (
        coordinator(tmp_path, run) as server,
        agent(server.address, "bee", tmp_path, *flags, **own) as bee,
        agent(server.address, "ant", tmp_path, **own) as ant,
    ):
        assert bee.end(150) == TEMPORARY, bee.read_log()
        assert ant.end(60) == 0, ant.read_log()
        assert server.process.wait(30) == 0
        [said] = [line for line in bee.read_log().splitlines() if "was lost in the middle of the run" in line]
        assert "the device of backend wgpu (" in said
        assert "start this worker again" in said
        assert "Traceback" not in bee.read_log()
        assert f"left the run after {NUM_STEPS} steps" in ant.read_log()
