"""The button that has the train state stored, with real workers."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.agents import TOY, agent
from tests.support.coordinator import TOKEN, coordinator

RUN: dict[str, Any] = {
    "run_id": "kept",
    "num_steps": 100_000,
    "min_workers": 1,
    "start_workers": 2,
    "task": {"name": TOY, "options": {}},
    "batch": {"samples": 8, "microbatches": 4, "evaluation_samples": 4},
    "evaluation": {"every_steps": 0},
    "state": {"publish_every": 50_000, "store_every": 50_000, "block_bytes": 4096},
    "timeouts": {"shutdown": "5s"},
    "dashboard": "127.0.0.1:0",
}


async def press(url: str) -> dict[str, Any]:
    """Presses the button, and returns the first view that shows what came of it."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60), read_bufsize=1 << 22) as session:
        async with session.post(f"{url}checkpoint", headers=headers) as said:
            assert (said.status, "is being stored" in await said.text()) == (200, True)
        async with session.get(f"{url}events") as said:
            async for line in said.content:
                view = json.loads(line[6:]) if line.startswith(b"data: ") else {}
                if view.get("stored_steps"):
                    return view
    raise AssertionError("the stream ended")


def test_a_state_is_stored_between_two_that_are_due_and_a_drained_worker_ends_well(tmp_path: Path) -> None:
    shared = ("--blocks-root", str(tmp_path / "blocks"))
    with coordinator(tmp_path, RUN) as server:
        server.wait_for_log("the dashboard is at ")
        url = server.read_log().partition("the dashboard is at ")[2].split()[0]
        with (
            agent(server.address, "ant", tmp_path, *shared) as ant,
            agent(server.address, "bee", tmp_path, *shared) as bee,
        ):
            server.wait_for_log("step 3 committed", 60)
            view = asyncio.run(press(url))
            [steps] = re.findall(r"stored the state behind step (\d+):", server.read_log())
            assert view["stored_steps"] == int(steps) > 3
            assert view["tiers"][2]["sentence"] == f"the newest stored state is that behind step {steps}"
            number = next(worker["worker_id"] for worker in view["workers"] if worker["name"] == "bee")
            asyncio.run(drain(url, number))
            assert bee.end(100) == 0, bee.read_log()
            assert "let go: the operator drained this worker" in bee.read_log()
            server.wait_for_log(", 1 worker,")
            assert "was given up" not in server.read_log()
            assert ant.process.poll() is None


async def drain(url: str, worker_id: int) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.post(f"{url}workers/{worker_id}/drain", headers=headers) as said,
    ):
        assert said.status == 200, await said.text()
