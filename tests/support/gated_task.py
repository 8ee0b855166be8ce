"""A toy task that stops in the middle of a run until a file appears, so that a test can do something meanwhile."""

import os
import select
import time
from pathlib import Path
from typing import Any

from tests.support.toy_task import ToyTask
from worker_agent.training.task import LossSums

GATED = "tests.support.gated_task:GatedTask"
PATIENCE_SECONDS = 90.0


class GatedTask(ToyTask):
    """Waits before one micro-batch, its AYNI_TEST_GATE_AFTER-th in this process, until AYNI_TEST_GATE exists."""

    calls = 0

    def loss(self, *arguments: Any, **named: Any) -> LossSums:
        self.calls += 1
        gate = os.environ.get("AYNI_TEST_GATE", "")
        if gate and self.calls == int(os.environ["AYNI_TEST_GATE_AFTER"]):
            Path(f"{gate}.{os.getpid()}").touch()
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not Path(gate).exists():
                assert time.monotonic() < deadline, f"the gate {gate} did not open"
                select.select([], [], [], 0.02)
        return super().loss(*arguments, **named)
