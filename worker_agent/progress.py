"""How far a worker is: a live line in a terminal, one log line per event otherwise.  [shell]"""

import logging
import sys
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from worker_agent.progress_texts import StepSummary, fetched_text, short_step_text, step_text

_log = logging.getLogger(__name__)

_FETCH_LOG_SHARE = 0.25
"""A fetch is logged each time that another such share of its bytes has come."""


class Reporter(Protocol):
    """Shows progress."""

    def fetched(self, done_bytes: int, total_bytes: int) -> None:
        """Shows how much of the run's files has come."""

    def stepped(self, summary: StepSummary, num_steps: int) -> None:
        """Shows a committed step."""

    def close(self) -> None:
        """Ends the display."""


def make_reporter(log_format: str) -> Reporter:
    """Returns what fits this process: the live line for people in front of a terminal, else log lines."""
    return LiveLine() if log_format == "text" and sys.stderr.isatty() else LogLines()


class LogLines:
    """One log line per event."""

    def __init__(self) -> None:
        """Starts with nothing logged."""
        self._next_share = 0.0

    def fetched(self, done_bytes: int, total_bytes: int) -> None:
        """Logs every quarter."""
        share = done_bytes / total_bytes if total_bytes else 1.0
        if share >= self._next_share:
            self._next_share = share - share % _FETCH_LOG_SHARE + _FETCH_LOG_SHARE
            _log.info("%s", fetched_text(done_bytes, total_bytes))

    def stepped(self, summary: StepSummary, num_steps: int) -> None:
        """Logs the step."""
        _log.info("%s", step_text(summary, num_steps))

    def close(self) -> None:
        """Does nothing."""


class LiveLine:
    """A line at the bottom of the terminal; log lines scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        """Takes over the terminal.

        Args:
            console: where to show it; None for standard error.
        """
        console = console or Console(stderr=True, soft_wrap=True)
        columns = (BarColumn(bar_width=16), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, transient=True)
        self._line: TaskID = self._progress.add_task("starting", total=None)
        self._handlers = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
        ]
        self._progress.start()
        # While the line is shown, standard error is rich's, which keeps log lines above it.
        self._point_logs_at_stderr()

    def fetched(self, done_bytes: int, total_bytes: int) -> None:
        """Shows how much of the run's files has come."""
        self._show(fetched_text(done_bytes, total_bytes), done_bytes, total_bytes)

    def stepped(self, summary: StepSummary, num_steps: int) -> None:
        """Shows a training step in the line; an evaluation is worth a log line of its own."""
        if summary.kind == "evaluate":
            _log.info("%s", step_text(summary, num_steps))
        else:
            self._show(short_step_text(summary, num_steps), summary.step + 1, num_steps)

    def close(self) -> None:
        """Gives the terminal back."""
        self._progress.stop()
        self._point_logs_at_stderr()

    def _show(self, text: str, done: int, total: int) -> None:
        self._progress.update(self._line, description=text, completed=done, total=total or None)

    def _point_logs_at_stderr(self) -> None:
        for handler in self._handlers:
            handler.setStream(sys.stderr)
