"""What is shown of progress, to people and to logs."""

import io
import logging
import sys
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from worker_agent.progress import LiveLine, LogLines, make_reporter
from worker_agent.progress_texts import fetched_text, step_text


@dataclass(frozen=True)
class Summary:
    kind: str = "train"
    step: int = 11
    world_size: int = 2
    num_samples: int = 8
    total_samples: int = 32
    loss: float = 0.25
    accuracy: float | None = 0.9375
    wall_s: float = 0.5
    best: bool = False
    note: str = ""


STEP = Summary()


def test_a_step_in_words():
    assert step_text(STEP, 80) == (
        "step 12 of 80: loss 0.2500, accuracy 0.9375, 64.0 samples/s, here 8 of 32 samples, 2 workers"
    )
    assert step_text(replace(STEP, accuracy=None, wall_s=0.0, note="no weight"), 0) == "step 12: loss 0.2500, no weight"


def test_an_evaluation_in_words():
    best = replace(STEP, kind="evaluate", best=True)
    assert step_text(best, 80) == "evaluation after 11 steps: loss 0.2500, accuracy 0.9375, best so far"


def test_a_fetch_in_words():
    assert fetched_text(1_500_000, 90_000_000) == "fetching the run's files: 1.5 of 90.0 MB"


def test_a_fetch_is_logged_by_quarters(caplog):
    caplog.set_level(logging.INFO)
    lines = LogLines()
    for done in range(1, 101):
        lines.fetched(done * 10**6, 100 * 10**6)
    assert [record.message.split()[4] for record in caplog.records] == ["1.0", "25.0", "50.0", "75.0", "100.0"]


def test_every_step_is_a_log_line(caplog):
    caplog.set_level(logging.INFO)
    lines = LogLines()
    lines.stepped(STEP, 80)
    lines.close()
    assert [record.message for record in caplog.records] == [step_text(STEP, 80)]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_without_a_terminal_there_is_no_live_line(log_format):
    assert not sys.stderr.isatty()
    assert isinstance(make_reporter(log_format), LogLines)


def test_the_live_line_shows_the_last_step_and_lets_logs_pass_above():
    terminal, before = io.StringIO(), sys.stderr
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        line = LiveLine(Console(file=terminal, force_terminal=True, width=120))
        assert handler.stream is sys.stderr is not before
        line.fetched(10**6, 2 * 10**6)
        line.stepped(STEP, 80)
        logging.getLogger("test").warning("something happened")
        line.close()
        assert handler.stream is sys.stderr is before
    finally:
        logging.getLogger().removeHandler(handler)
    shown = terminal.getvalue()
    assert "something happened" in shown
    assert "step 12 of 80, loss 0.2500, 64 samples/s, 2 workers" in shown
