"""When a worker whose device is lost does not become the same command again."""

import logging
import os
import sys
from pathlib import Path

import pytest

from worker_agent.lost_device import DeviceLost, go_on_without


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that a process would have become."""
    made: list[list[str]] = []
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(os, "execv", lambda _, command: made.append(command))
    return made


@pytest.mark.parametrize("form", ["--token-file={}", "{}"])
def test_what_can_be_read_only_once_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[list[str]], form: str
):
    once, file = tmp_path / "once", tmp_path / "file"
    os.mkfifo(once)
    file.touch()
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "worker_agent", form.format(once)])
    go_on_without(DeviceLost("the device was lost"))
    assert commands == []
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "worker_agent", form.format(file)])
    go_on_without(DeviceLost("the device was lost"))
    assert [command[-3:] for command in commands] == [[form.format(file), "--backend", "cpu"]]


def test_a_command_that_can_not_be_started_leaves_the_reason(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(os, "execv", fail)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "worker_agent"])
    go_on_without(DeviceLost("the device was lost"))
