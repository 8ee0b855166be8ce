"""The train state as blocks: published, stored by all workers together, and gone on from by another number of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import TOY, agent
from tests.support.coordinator import coordinator

RUN: dict[str, Any] = {
    "run_id": "toy",
    "num_steps": 6,
    "min_workers": 2,
    "task": {"name": TOY, "options": {"dropout": 0.25, "width": 64}},
    "batch": {"samples": 12, "microbatches": 6, "evaluation_samples": 4},
    "optimizer": {"learning_rate": 0.05, "update": "host"},
    "evaluation": {"every_steps": 0},
    "state": {"publish_every": 1, "store_every": 3, "block_bytes": 4096},
    "timeouts": {"shutdown": "10s"},
}


def run(folder: Path, run: dict[str, Any], names: list[str]) -> tuple[str, str]:
    """Makes a run with these agents; returns the coordinator's log and the final parameters' hash."""
    blocks = str(folder / "blocks")
    with coordinator(folder / run["run_id"], run) as server:
        agents = [agent(server.address, name, folder / run["run_id"], "--blocks-root", blocks) for name in names]
        entered = [one.__enter__() for one in agents]
        try:
            assert [one.end() for one in entered] == [0] * len(names), entered[0].read_log() + server.read_log()
            assert server.process.wait(30) == 0
        finally:
            for one in agents:
                one.__exit__(None, None, None)
        farewells = {
            line.rpartition("parameters ")[2]
            for one in entered
            for line in one.read_log().splitlines()
            if "left the run after" in line
        }
        assert len(farewells) == 1
        return server.read_log(), farewells.pop()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("state")
    log, final = run(folder, RUN, ["ant", "bee"])
    return folder, log, final


def test_every_due_state_is_stored_and_the_last_one_before_the_run_ends(whole_run: tuple[Path, str, str]):
    _, log, _ = whole_run
    assert "stored the state behind step 3" in log
    assert "stored the state behind step 6" in log
    assert "was not stored" not in log


@pytest.mark.parametrize("names", [["cat"], ["cat", "dog", "eel"]], ids=["one worker", "three workers"])
def test_a_run_goes_on_from_a_stored_state_with_other_workers_to_the_same_bytes(
    whole_run: tuple[Path, str, str], names: list[str]
):
    folder, _, final = whole_run
    resumed = {
        **RUN,
        "run_id": f"again{len(names)}",
        "min_workers": len(names),
        "state": {"resume_step": 3, "resume_run_id": "toy", "block_bytes": 4096},
    }
    _, again = run(folder, resumed, names)
    assert again == final
    steps = [
        json.loads(line)["step"]
        for line in (folder / resumed["run_id"] / names[0] / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[0] == 3


def test_a_state_that_is_not_stored_is_said_to_be_missing(whole_run: tuple[Path, str, str]):
    folder, _, _ = whole_run
    resumed = {**RUN, "run_id": "lost", "min_workers": 1, "state": {"resume_step": 4, "resume_run_id": "toy"}}
    with (
        coordinator(folder / "lost", resumed) as server,
        agent(server.address, "cat", folder / "lost", "--blocks-root", str(folder / "blocks")) as cat,
    ):
        assert cat.end() == 1
        assert "no state behind step 4 of run toy is stored in checkpoints" in cat.read_log()
        assert "goes on from the state behind step 4 of run toy, waits for 1 worker\n" in server.read_log()


def test_a_run_whose_state_can_not_be_stored_goes_on_and_says_why(tmp_path: Path):
    broken = {**RUN, "run_id": "broken", "state": {**RUN["state"], "store": {"bucket": "../elsewhere"}}}
    log, final = run(tmp_path, broken, ["ant", "bee"])
    assert len(final) == 16
    assert "the state behind step 3 was not stored" in log
    assert "must stay below the worker's root" in log
    assert "Traceback" not in log


def test_a_run_that_stores_goes_on_where_the_state_was_one_to_be_stored(whole_run: tuple[Path, str, str]):
    folder, _, final = whole_run
    resumed = {
        **RUN,
        "run_id": "storing",
        "min_workers": 1,
        "state": {**RUN["state"], "resume_step": 3, "resume_run_id": "toy"},
    }
    log, again = run(folder, resumed, ["cat"])
    assert again == final
    assert "stored the state behind step 6" in log
    assert "stored the state behind step 3" not in log


def test_the_last_due_state_is_stored_although_the_run_ends_between_two(tmp_path: Path):
    between = {**RUN, "run_id": "between", "num_steps": 4, "min_workers": 1}
    log, _ = run(tmp_path, between, ["ant"])
    assert "stored the state behind step 3" in log


def test_a_state_of_another_run_of_the_same_name_is_not_taken_for_this_one(whole_run: tuple[Path, str, str]):
    folder, _, _ = whole_run
    (folder / "twin").mkdir()
    (folder / "twin" / "blocks").symlink_to(folder / "blocks")
    log, _ = run(folder / "twin", {**RUN, "seed": 5}, ["ant", "bee"])
    assert "the state behind step 3 was not stored: block 0 is there already" in log
    assert "stored the state behind step" not in log


def test_workers_whose_stores_are_not_one_store_nothing(tmp_path: Path):
    apart = {**RUN, "run_id": "apart", "num_steps": 3, "state": {**RUN["state"], "block_bytes": 4096}}
    with (
        coordinator(tmp_path, apart) as server,
        agent(server.address, "ant", tmp_path, "--blocks-root", str(tmp_path / "one")) as ant,
        agent(server.address, "bee", tmp_path, "--blocks-root", str(tmp_path / "other")) as bee,
    ):
        assert (ant.end(), bee.end()) == (0, 0)
        server.wait_for_log("all workers must share the folder")
        assert "stored the state behind step" not in server.read_log()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 9}, "was written with seed 0, but this run has seed 9"),
        ({"optimizer": {"name": "sgd", "learning_rate": 0.05, "update": "host"}}, "was written with optimizer adamw"),
        ({"optimizer": {"learning_rate": 0.05, "update": "device"}}, "set optimizer.update to host"),
    ],
)
def test_a_state_of_another_kind_of_run_is_refused(
    whole_run: tuple[Path, str, str], change: dict[str, Any], sentence: str
):
    folder, _, _ = whole_run
    name = f"other{len(sentence)}"
    resumed = {
        **RUN,
        "run_id": name,
        "min_workers": 1,
        "state": {"resume_step": 3, "resume_run_id": "toy", "block_bytes": 4096},
        **change,
    }
    with (
        coordinator(folder / name, resumed) as server,
        agent(server.address, "cat", folder / name, "--blocks-root", str(folder / "blocks")) as cat,
    ):
        assert cat.end() == 1
        assert sentence in cat.read_log()


def test_a_damaged_state_is_refused(whole_run: tuple[Path, str, str]):
    folder, _, _ = whole_run
    objects = [
        path for path in (folder / "blocks" / "checkpoints").rglob("*") if path.is_file() and path.stat().st_size
    ]
    assert len(objects) >= 4
    for path in objects:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    resumed = {
        **RUN,
        "run_id": "damaged",
        "min_workers": 1,
        "state": {"resume_step": 6, "resume_run_id": "toy", "block_bytes": 4096},
        "num_steps": 9,
    }
    with (
        coordinator(folder / "damaged", resumed) as server,
        agent(server.address, "cat", folder / "damaged", "--blocks-root", str(folder / "blocks")) as cat,
    ):
        assert cat.end() == 1
        assert "can't be loaded, the first is block 0" in cat.read_log()
        assert "checksum" in cat.read_log().lower()
        assert "Traceback" not in cat.read_log()
