"""What trackers that are named twice, or time out by themselves, lead to."""

import pytest

from ayni.settings import SettingsError
from worker_agent.training import trackers


def test_a_tracker_named_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", _Quiet)
    with pytest.raises(SettingsError, match="twice"):
        trackers.Trackers(["wandb", "wandb"], "run", "worker").close()


def test_a_trackers_own_timeout_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", _TimesOut)
    with pytest.raises(SettingsError, match="could not begin: connecting took too long"):
        trackers.Trackers(["mlflow"], "run", "worker")


class _Quiet(trackers.WandbTracker):
    def __init__(self, run_id: str, worker: str) -> None:
        pass

    def close(self) -> None:
        pass


class _TimesOut(trackers.MlflowTracker):
    def __init__(self, run_id: str, worker: str) -> None:
        raise TimeoutError("connecting took too long")
