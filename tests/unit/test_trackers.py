"""Numbers that also go to experiment trackers."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ayni.settings import SettingsError
from tests.unit.test_metrics import event
from worker_agent.training.metrics import Metrics
from worker_agent.training.trackers import Trackers


class FakeWandb:
    def __init__(self) -> None:
        self.begun: dict[str, str] = {}
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def init(self, **facts: str) -> "FakeWandb":
        self.begun = facts
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if step == 5:
            raise OSError("no network")
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished = True


def test_events_go_to_the_trackers_that_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb, calls = FakeWandb(), []
    names = ("set_experiment", "start_run", "log_metrics", "end_run")

    def noting(name: str) -> Any:
        return lambda *args, **kwargs: calls.append((name, args, kwargs))

    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**{name: noting(name) for name in names}))
    metrics = Metrics(tmp_path, tensorboard=False, trackers=Trackers(("wandb", "mlflow"), "bbc", "ant"))
    metrics.write(event())
    metrics.close()
    assert wandb.begun == {"project": "ayni", "group": "bbc", "name": "bbc/ant"}
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
    with pytest.raises(SettingsError, match="mlflow is not installed; pip install mlflow"):
        Trackers(("mlflow",), "bbc", "ant")
