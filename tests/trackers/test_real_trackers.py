"""W&B and MLflow themselves: what two workers told them, read back by their own programs."""

import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import TOY, AgentProcess, agent
from tests.support.coordinator import coordinator
from tests.support.tracked_runs import python, read_mlflow, read_wandb, settings, told

RUN: dict[str, Any] = {
    "run_id": "tracked",
    "num_steps": 4,
    "min_workers": 2,
    "task": {"name": TOY},
    "batch": {"samples": 10, "microbatches": 5, "evaluation_samples": 4},
    "evaluation": {"every_steps": 2},
    "timeouts": {"shutdown": "10s"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, AgentProcess]]:
    """A run of two workers that begin at the same moment with one new SQLite file."""
    folder = tmp_path_factory.mktemp("tracked")
    flags, extra = ("--trackers", "wandb,mlflow"), settings(folder)
    with (
        coordinator(folder / "run", RUN) as server,
        agent(server.address, "ant", folder / "run", *flags, **extra) as ant,
        agent(server.address, "bee", folder / "run", *flags, **extra) as bee,
    ):
        assert (ant.end(180), bee.end()) == (0, 0), ant.read_log() + bee.read_log()
        assert server.process.wait(30) == 0
    return folder, {"ant": ant, "bee": bee}


def test_wandb_has_every_number_of_every_step(trained: tuple[Path, dict[str, AgentProcess]]) -> None:
    folder, workers = trained
    runs = {found["run"]["display_name"]: found for found in read_wandb(folder)}
    assert set(runs) == {"tracked/ant", "tracked/bee"}
    for name, worker in workers.items():
        found = runs[f"tracked/{name}"]
        assert (found["run"]["project"], found["run"]["run_group"]) == ("ayni", "tracked")
        assert found["exit"]["exit_code"] == 0
        rows = [{key: value for key, value in row.items() if not key.startswith("_")} for row in found["history"]]
        assert rows == [{**told(event), "step": event["step"]} for event in worker.metrics()]
        assert len(rows) == 6


def test_mlflow_has_every_number_of_every_step(trained: tuple[Path, dict[str, AgentProcess]]) -> None:
    folder, workers = trained
    runs = read_mlflow(folder, "tracked")
    assert set(runs) == {"ant", "bee"}
    for name, worker in workers.items():
        expected = defaultdict(list)
        for event in worker.metrics():
            for key, value in told(event).items():
                expected[key].append([event["step"], value])
        assert runs[name] == {"status": "FINISHED", "metrics": expected}
        assert len(expected["train/loss"]) == 4


def test_wandb_keeps_the_numbers_of_a_run_that_went_back(tmp_path: Path) -> None:
    program = (
        "from worker_agent.training.trackers import Trackers\n"
        "trackers = Trackers(('wandb',), 'back', 'ant')\n"
        "for step, loss in ((1, 0.5), (2, 0.4), (1, 0.3), (2, float('nan'))):\n"
        "    trackers.log({'train/loss': loss}, step)\n"
        "trackers.close()\n"
    )
    python(program, tmp_path)
    [found] = read_wandb(tmp_path)
    rows = [(row["step"], row["train/loss"]) for row in found["history"]]
    assert rows == [(1, 0.5), (2, 0.4), (1, 0.3), (2, "NaN")]


def test_a_worker_whose_tracker_can_not_begin_does_not_join(tmp_path: Path) -> None:
    flags, extra = ("--trackers", "wandb"), settings(tmp_path, WANDB_MODE="online", WANDB_API_KEY="")
    with coordinator(tmp_path, RUN) as server:
        with agent(server.address, "ant", tmp_path, *flags, **extra) as ant:
            assert ant.end() == 2, ant.read_log()
        assert "trackers: wandb could not begin: " in ant.read_log()
        assert "Traceback" not in ant.read_log()
        assert "ant" not in server.read_log()


class Tracking(BaseHTTPRequestHandler):
    """As much of an MLflow server as lets a run begin; nothing that comes then is answered."""

    def do_GET(self) -> None:
        self._answer('{"experiment": {"experiment_id": "1", "name": "gone", "lifecycle_stage": "active"}}')

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.rfile.read(length)
        if self.path.endswith("/runs/create"):
            info = '{"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING", "start_time": 1}'
            self._answer(f'{{"run": {{"info": {info}, "data": {{}}}}}}')
        else:
            self.rfile.read(1)  # Until the client goes.

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


def test_no_step_waits_for_a_tracking_server_that_has_gone(tmp_path: Path) -> None:
    program = (
        "import logging, sys, time\n"
        "from worker_agent.training import trackers\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "trackers.END_SECONDS = 0.5\n"
        "told = trackers.Trackers(('mlflow',), 'gone', 'ant')\n"
        "began = time.monotonic()\n"
        "for step in range(3):\n"
        "    told.log({'train/loss': 0.5}, step)\n"
        "told.close()\n"
        "assert time.monotonic() - began < 5\n"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Tracking)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        said = python(program, tmp_path, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert "tracker mlflow is still busy" in said
