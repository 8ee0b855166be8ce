"""Numbers that also go to experiment trackers."""

import contextlib
import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ayni.settings import SettingsError
from tests.unit.test_metrics import event
from worker_agent.training import tracker_thread
from worker_agent.training.metrics import Metrics
from worker_agent.training.tracker_thread import TrackerThread
from worker_agent.training.trackers import MlflowTracker, Trackers


class FakeWandb:
    def __init__(self) -> None:
        self.begun: dict[str, str] = {}
        self.axes: list[tuple[str, str]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def init(self, **facts: str) -> "FakeWandb":
        self.begun = facts
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        if values["step"] == 5:
            raise OSError("no network")
        self.logged.append((values, int(values["step"])))

    def finish(self) -> None:
        self.finished = True


def test_events_go_to_the_trackers_that_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb, calls = FakeWandb(), []
    names = ("set_experiment", "start_run", "log_metrics", "end_run")

    def noting(name: str) -> Any:
        return lambda *args, **kwargs: calls.append((name, args, kwargs))

    monkeypatch.setitem(sys.modules, "wandb", wandb)
    mlflow = SimpleNamespace(get_tracking_uri=lambda: "http://tracking", **{name: noting(name) for name in names})
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    metrics = Metrics(tmp_path, tensorboard=False, trackers=Trackers(("wandb", "mlflow"), "bbc", "ant"))
    metrics.write(event())
    metrics.close()
    assert wandb.begun == {"project": "ayni", "group": "bbc", "name": "bbc/ant"}
    assert wandb.axes == [("*", "step")]
    [(values, step)] = wandb.logged
    assert (step, values["train/loss"], values["train/accuracy"]) == (3, 0.5, 0.75)
    assert wandb.finished
    assert [call[0] for call in calls] == list(names)
    assert calls[0][1] == ("bbc",)
    assert calls[2][2] == {"step": 3}


def test_a_tracker_that_fails_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    metrics = Metrics(tmp_path, tensorboard=False, trackers=Trackers(("wandb",), "bbc", "ant"))
    for step in (4, 5, 6):
        metrics.write(event(step=step))
    metrics.close()
    assert [step for _, step in wandb.logged] == [4]
    assert "tracker wandb failed at step 5 and gets no more numbers: no network" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_what_is_unknown_or_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match="trackers: clearml is not one of wandb, mlflow"):
        Trackers(("clearml",), "bbc", "ant")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(SettingsError, match=r"mlflow is not installed; pip install 'ayni\[trackers\]'"):
        Trackers(("mlflow",), "bbc", "ant")


def test_a_tracker_that_can_not_begin_says_why_and_the_others_end(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: str) -> None:
        raise OSError("no such store")

    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(
        sys.modules, "mlflow", SimpleNamespace(get_tracking_uri=lambda: "sqlite:///x.db", set_experiment=refuse)
    )
    with pytest.raises(SettingsError, match="trackers: mlflow could not begin: no such store"):
        Trackers(("wandb", "mlflow"), "bbc", "ant")
    assert wandb.finished


def test_workers_of_one_host_begin_with_one_sqlite_file_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun = threading.Event()
    monkeypatch.setitem(
        sys.modules,
        "mlflow",
        SimpleNamespace(
            get_tracking_uri=lambda: f"sqlite:///{tmp_path / 'mlflow.db'}",
            set_experiment=lambda _: begun.set(),
            start_run=lambda run_name: None,
        ),
    )
    with open_folder(tmp_path) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = TrackerThread("mlflow", lambda: MlflowTracker("bbc", "ant"))
        assert not begun.wait(0.2)
    thread.begun.result(10)
    assert begun.is_set()


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Stuck:
    """A tracker whose server does not answer until it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.entered = threading.Event()
        self.told: list[int] = []
        self.closed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.entered.set()
        self.answers.wait()
        self.told.append(step)

    def close(self) -> None:
        self.closed = True


def test_no_step_waits_for_a_tracker(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(tracker_thread, "MOST_WAITING", 2)
    stuck = Stuck()
    thread = TrackerThread("mlflow", lambda: stuck)
    thread.log({}, 1)
    assert stuck.entered.wait(10)
    for step in (2, 3, 4, 5):
        thread.log({}, step)
    assert "tracker mlflow is 2 steps behind; numbers from step 4 on are left out" in caplog.text
    thread.close(deadline=0.0)
    assert "tracker mlflow is still busy" in caplog.text
    stuck.answers.set()
    thread.close(deadline=time.monotonic() + 10)
    assert stuck.told == [1, 2, 3]
    assert stuck.closed
