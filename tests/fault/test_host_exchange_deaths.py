"""Workers of one host that reduce out of one another's memory are killed or stopped in the middle of a step.

Every run must end with the bytes of a run to which nothing happened, and leave nothing behind on the host.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator_service import ledger as ledger_check
from scripts.chaos_result import count_samples
from tests.support.agents import TOY
from tests.support.chaos_agents import crew, ledger

STEPS, BATCH = 10, 12
LONGEST_RUN_S = 90.0
RUN: dict[str, Any] = {
    "run_id": "near",
    "seed": 5,
    "num_steps": STEPS,
    "timeouts": {"heartbeat_interval": "300ms", "lease": "2s", "accept": "5s"},
    "min_workers": 1,
    # A flat vector of nine segments: every worker owns a slice of it.
    "task": {"name": TOY, "options": {"width": 60_000, "buckets": 1}},
    "batch": {"samples": BATCH, "microbatches": 6},
    "optimizer": {"name": "adamw", "learning_rate": 3.0e-3, "update": "host"},
}
NEAR = "slices that 2 other workers reduce go through memory that is shared with them"
HALF, SENT, COMMITTED = "worker.contribution.half", "worker.contribution.sent", "worker.commit.received"
Trace = tuple[list[tuple[int, str, float]], str]


def trace(folder: Path) -> Trace:
    """Hashes, norms and the final parameters of a run that used every sample once."""
    commits, facts = ledger(folder, RUN["run_id"])
    samples = count_samples(commits, STEPS, BATCH)
    assert (samples.missing, samples.duplicated) == (0, 0)
    assert not ledger_check.check(commits, ledger_check.data_from(facts)).problems
    return [(one.step, one.gradient_hash, one.gradient_norm) for one in commits], facts["final_parameters_sha256"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """One worker alone, whose gradients the coordinator reduces."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with crew(folder, RUN) as alone:
        alone.start_coordinator()
        alone.start_agent("ant")
        alone.finish(LONGEST_RUN_S)
    return trace(folder)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("name", "count", "action"),
    [(HALF, 9, "kill"), (SENT, 9, "kill"), (COMMITTED, 4, "kill"), (HALF, 9, "stop")],
    ids=["in the middle of a contribution", "when all was said", "after a commit", "frozen"],
)
def test_a_worker_whose_memory_others_read_may_end_at_any_moment(
    name: str, count: int, action: str, tmp_path: Path, undisturbed: Trace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "sockets"))
    (tmp_path / "sockets").mkdir(mode=0o700)
    before = set(os.listdir("/dev/shm"))
    run = {**RUN, "topology": "sharded", "start_workers": 3}
    # Not "bee", whose gradients travel.
    with crew(tmp_path, run, agent_failpoints={"cat": (f"{name}={action}@{count}",)}) as workers:
        workers.start_coordinator()
        for one in ("ant", "cat", "dog"):
            workers.start_agent(one)
        if action == "stop":
            workers.wait_for_log("cat", f"failpoint {name}: stop")
            workers.wait_for_log("coordinator", "worker cat left: its lease ended")
            workers.signal("cat", signal.SIGCONT)
        workers.finish(LONGEST_RUN_S)
        assert workers.deaths == (["cat"] if action == "kill" else []), workers.logs()
        assert all(NEAR in workers.said(one) for one in ("ant", "cat", "dog")), workers.logs()
        travelled = [line for line in workers.said("ant").splitlines() if "its bytes travel" in line]
        assert all("reduced by worker cat" in line for line in travelled), workers.logs()
    assert trace(tmp_path) == undisturbed
    assert set(os.listdir("/dev/shm")) == before
    assert not list((tmp_path / "sockets" / "ayni").iterdir())
