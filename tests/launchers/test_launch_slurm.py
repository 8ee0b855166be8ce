"""Agents started by Slurm: one task on each of two nodes."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.launching import PYTHON, Place, agent_command, place, program
from tests.support.slurm_cluster import NODES, slurm_cluster


def batch(where: Place) -> Path:
    """The batch script of docs/launch.md, with this test's names."""
    script = where.folder / "job.sh"
    agent = " ".join([PYTHON, *agent_command(where)])
    script.write_text(f"#!/bin/bash\nsrun --kill-on-bad-exit=0 {agent}\n")
    return script


def test_slurm_starts_a_whole_run_and_a_killed_agent_costs_it_nothing(plain: str) -> None:
    with place() as where, slurm_cluster(where) as cluster:
        log = where.folder / "job.log"
        arguments = ["--nodes=2", "--ntasks-per-node=1", "--requeue", f"--output={log}", str(batch(where))]
        assert cluster.wait_for_end(cluster.submit(*arguments)) == "COMPLETED 0:0", log.read_text()
        said = log.read_text()
        assert where.final_parameters() == plain, said
        for rank in (0, 1):
            assert f"launch.rank {rank} [SLURM_PROCID of Slurm], launch.world_size 2 [SLURM_STEP_NUM_TASKS" in said
        assert f"coordinator {NODES[0]}:{where.port} [SLURM_STEP_NODELIST of Slurm and launch.port]" in said

        job = cluster.submit(*arguments, **where.gated(), AYNI_FRESH="true")
        at_gate = where.wait_at_gate(2)
        os.kill(next(pid for pid in at_gate if where.name_of(pid, "SLURM_PROCID") == "1"), signal.SIGKILL)
        where.gate.touch()
        # srun says that one of its tasks was killed.
        assert cluster.wait_for_end(job) == f"FAILED {128 + signal.SIGKILL}:0", log.read_text()
        said = log.read_text()
        assert where.final_parameters() == plain, said
        assert "step 39 committed: " in said


@pytest.mark.parametrize("missing", ["munged", "srun", "mpirun"])
def test_a_missing_program_is_named_with_its_package(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(AssertionError, match=rf"{missing} is missing, .*: apt-get install \w+"):
        program(missing)
