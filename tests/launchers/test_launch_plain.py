"""Agents started by no launcher: explicit places, and the coordinator beside rank 0."""

import os
import signal

import pytest

from tests.support.launching import PYTHON, Place, agent_command, finish, place, start


def explicit(where: Place) -> list[str]:
    place_flags = ["--launch-rank", "0", "--launch-world-size", "1", "--coordinator", f"127.0.0.1:{where.port}"]
    return [PYTHON, *agent_command(where, *place_flags)]


def coordinators(where: Place) -> list[int]:
    return [pid for pid, line in where.processes().items() if "-m coordinator_service" in line]


def test_rank_0_starts_the_coordinator_and_a_finished_run_is_not_begun_again(plain: str) -> None:
    with place() as where:
        said = finish(where, *explicit(where))
        assert where.final_parameters() == plain
        assert "taken from the environment" not in said
        assert not where.processes()
        said = finish(where, *explicit(where), code=2)
        assert "run 'toy' in" in said
        assert "is finished, after 40 steps" in said
        assert "the coordinator of run file" in said.splitlines()[-1]
        assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_coordinator_beside_an_agent_ends_with_it(number: signal.Signals) -> None:
    with place() as where:
        log = where.folder / "agent.log"
        with start(where, log, *explicit(where), **where.gated()) as process:
            where.wait_at_gate(1)
            [coordinator] = coordinators(where)
            os.kill(process.pid, number)
            where.wait_for(lambda: not coordinators(where), f"coordinator {coordinator} has ended", 30.0)
            where.wait_for(lambda: process.poll() is not None, "the agent has ended", 30.0)
            assert process.returncode == (1 if number == signal.SIGTERM else -number)
        assert "SIGTERM: stopping" in log.read_text()
        assert "Traceback" not in log.read_text()
        assert not where.processes()
