"""The state of a run goes to a newcomer in another process, which ends with the same bytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agents import TOY
from tests.support.coordinator import environment

ROOT = Path(__file__).resolve().parents[2]
RUN = f"""
run_id: toy
num_steps: 8
task: {{name: "{TOY}", options: {{width: 32, dropout: 0.25}}}}
batch: {{samples: 12, microbatches: 6, evaluation_samples: 4}}
optimizer: {{learning_rate: 0.05, update: host}}
state: {{block_bytes: 4096}}
"""


@pytest.mark.timeout(180)
def test_the_newcomer_ends_with_the_same_parameters(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(RUN)
    command = [sys.executable, str(ROOT / "scripts" / "hand_over_state.py"), "--run", "run.yaml"]
    done = subprocess.run(
        [*command, "--steps", "8", "--at", "5", "--output-dir", "out"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=170,
    )
    logs = "\n".join(path.read_text() for path in (tmp_path / "out").glob("*.log"))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["identical"]
    assert result["handed_over_at"] == 5
    assert "going on from the state behind step 5" in (tmp_path / "out" / "newcomer.log").read_text()
    assert "through engine shm" in (tmp_path / "out" / "newcomer.log").read_text()


def test_a_step_outside_the_run_is_refused(tmp_path: Path):
    command = [sys.executable, str(ROOT / "scripts" / "hand_over_state.py"), "--steps", "8", "--at", "8"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--at (8) must be more than half of --steps (8) and less than it" in done.stderr
