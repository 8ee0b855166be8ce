"""Agents as actors of Ray."""

import re

from tests.support.launching import PYTHON, place, start
from tests.support.ray_nodes import NODE, ray_nodes


def test_a_killed_ray_node_costs_the_run_nothing(plain: str) -> None:
    with place() as where, ray_nodes(where, **where.gated()) as nodes:
        # One after the other: of two nodes of one host that start at once, Ray sometimes never hears of one.
        nodes.add("a", "127.0.0.3", 1, f"--address={nodes.address}")
        nodes.wait_for_nodes(2)
        nodes.add("b", "127.0.0.4", 1, f"--address={nodes.address}")
        nodes.wait_for_nodes(3)
        command = [PYTHON, "-m", "worker_agent", "ray", "--agents", "2", "--address", nodes.address]
        command += ["--run", str(where.run_file), "--port", str(where.port), "--", "--threads", "1"]
        log = where.folder / "driver.log"
        with start(where, log, *command, **nodes.environment) as driver:
            homes = {where.name_of(pid, NODE) for pid in where.wait_at_gate(2)}
            assert len(homes) == 2
            victim = max(homes - {"head"})
            assert nodes.kill(victim) >= 2  # Its raylet and its agent.
            # The name says which attempt it is.
            back = re.compile(r"worker \S+-r[01]\.1-\d+ joined as ")
            where.wait_for(lambda: back.search(log.read_text()), "the agent is back on the third node", 90.0, log)
            where.gate.touch()
            assert driver.wait(180) == 0, log.read_text()
        said = log.read_text()
        assert where.final_parameters() == plain, said
        assert "was lost (" in said
        assert "; attempt 1 begins where there is room" in said
