"""A coordinator is killed while a state is being stored: the next one stores it, and those that follow, whole."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import TOY, agent
from tests.support.coordinator import coordinator

RUN: dict[str, Any] = {
    "run_id": "again",
    "num_steps": 12,
    "min_workers": 2,
    "task": {"name": TOY, "options": {"dropout": 0.25, "width": 64}},
    "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05, "update": "host"},
    "evaluation": {"every_steps": 0},
    "state": {"publish_every": 3, "store_every": 3, "keep": 2, "block_bytes": 4096},
    "timeouts": {"shutdown": "10s"},
}

NUM_BLOCKS = 3
"""Of the task's state."""


@pytest.mark.parametrize("failpoint", ["coordinator.state.blocks_put", "coordinator.state.stored"])
def test_a_state_whose_storing_was_cut_short_is_stored_by_the_next_coordinator(tmp_path: Path, failpoint: str):
    blocks = tmp_path / "blocks"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(coordinator(tmp_path, RUN, failpoints=f"{failpoint}=kill@2"))
        flags = ("--blocks-root", str(blocks))
        ant, bee = (stack.enter_context(agent(first.address, name, tmp_path, *flags)) for name in ("ant", "bee"))
        assert first.process.wait(90) == -9, first.read_log()
        assert "stored the state behind step 3" in first.read_log()
        assert "stored the state behind step 6" not in first.read_log()
        second = stack.enter_context(coordinator(tmp_path, {**RUN, "listen": first.address}))
        assert (ant.end(90), bee.end(90)) == (0, 0), second.read_log()
        assert second.process.wait(30) == 0
        log = second.read_log()
    assert "not stored" not in log
    assert [line.split("step ")[1].split(":")[0] for line in log.splitlines() if "stored the state" in line] == [
        *("6", "9", "12")
    ]
    # Only the states that the run keeps are left: those behind steps 9 and 12, each of as many blocks.
    left = [path for path in blocks.rglob("*") if path.is_file() and path.stat().st_size > 4000]
    assert len(left) == 2 * NUM_BLOCKS
