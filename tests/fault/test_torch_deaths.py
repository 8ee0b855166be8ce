"""Runs of topology torch in which a worker is killed, freezes or comes late: the others finish, and all agree."""

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_torch_runs import RUN, parameters
from tests.support.agents import AgentProcess, agent
from tests.support.coordinator import CoordinatorProcess, coordinator

QUICK: dict[str, Any] = {
    **RUN,
    "topology": "torch",
    "timeouts": {"heartbeat_interval": "200ms", "lease": "2s", "shutdown": "10s"},
}


def crew(stack: ExitStack, folder: Path, failing: str, *names: str) -> tuple[CoordinatorProcess, list[AgentProcess]]:
    """A run of some workers, the last of which joins last and fails where it is told to."""
    server = stack.enter_context(coordinator(folder, {**QUICK, "start_workers": len(names)}))
    *good, last = names
    agents = [stack.enter_context(agent(server.address, name, folder)) for name in good]
    for one in agents:
        one.wait_for_log("waiting for")
    return server, [*agents, stack.enter_context(agent(server.address, last, folder, AYNI_FAILPOINTS=failing))]


@pytest.mark.parametrize("place", ["worker.contribution.half", "worker.contribution.sent", "worker.commit.asked"])
def test_a_worker_that_is_killed_in_a_step_is_done_without(tmp_path: Path, place: str):
    with ExitStack() as stack:
        server, (ant, bee, cow) = crew(stack, tmp_path, f"{place}=kill@4", "ant", "bee", "cow")
        assert cow.end() == -signal.SIGKILL
        assert len({parameters(ant), parameters(bee)}) == 1
        assert server.process.wait(30) == 0


def test_a_worker_that_freezes_in_a_step_is_done_without(tmp_path: Path):
    with ExitStack() as stack:
        server, (ant, bee, cow) = crew(stack, tmp_path, "worker.contribution.half=stop@4", "ant", "bee", "cow")
        assert len({parameters(ant), parameters(bee)}) == 1
        assert server.process.wait(30) == 0
        assert cow.process.poll() is None


def test_the_worker_whose_store_the_group_uses_freezes_and_is_done_without(tmp_path: Path):
    failing = {"AYNI_FAILPOINTS": "worker.contribution.half=stop@4"}
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(tmp_path, {**QUICK, "start_workers": 3}))
        # The one that joins first has the lowest rank.
        cow = stack.enter_context(agent(server.address, "cow", tmp_path, **failing))
        cow.wait_for_log("waiting for 2 more")
        ant = stack.enter_context(agent(server.address, "ant", tmp_path))
        bee = stack.enter_context(agent(server.address, "bee", tmp_path))
        assert len({parameters(ant), parameters(bee)}) == 1
        assert server.process.wait(30) == 0
        assert cow.process.poll() is None


def test_a_worker_whose_turn_fails_is_in_the_next_group(tmp_path: Path):
    with ExitStack() as stack:
        server, agents = crew(stack, tmp_path, "worker.contribution.half=fail@4", "ant", "bee")
        assert len({parameters(one) for one in agents}) == 1
        assert server.process.wait(30) == 0
        assert "form another exchange group" in server.read_log()


def test_a_worker_that_joins_late_is_in_the_next_group(tmp_path: Path):
    run = {**QUICK, "start_workers": 2, "min_workers": 2}
    killed = {"AYNI_FAILPOINTS": "worker.contribution.half=kill@4"}
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(tmp_path, run))
        ant = stack.enter_context(agent(server.address, "ant", tmp_path))
        bee = stack.enter_context(agent(server.address, "bee", tmp_path, **killed))
        assert bee.end() == -signal.SIGKILL
        cow = stack.enter_context(agent(server.address, "cow", tmp_path))
        assert len({parameters(ant), parameters(cow)}) == 1
        assert server.process.wait(30) == 0
