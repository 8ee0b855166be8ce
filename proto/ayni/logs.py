"""Log lines for people or machines, with context and without secrets.  [shell]

One event is one line on standard error. Run, worker, rank, epoch, step and bucket come from `log_context`, or, for
machines, from `set_fields` and the event's own `extra`, so that hardly any call site passes them. Text that was
registered as secret never leaves through a log, whatever part of the event holds it.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType

FORMATS = ("text", "json")
FIELDS = ("run", "worker", "rank", "epoch", "step", "bucket")
"""Names that `log_context` and `set_fields` take."""

_context: ContextVar[Mapping[str, object]] = ContextVar("ayni_log_context", default=MappingProxyType({}))
_fields: dict[str, object] = {}
_secrets: set[str] = set()
_QUIET = frozenset(
    "asyncio filelock fsspec grpc matplotlib peft safetensors tensorboard tokenizers torch transformers urllib3".split()
)
"""Packages below us, heard from WARNING on. A task of the user's own logs as ours do."""
_REDACTED = "[redacted]"


def configure(log_format: str = "text", level: str = "INFO") -> None:
    """Sets up logging for the process. For `__main__` only; a second call replaces the first one's set-up.

    Raises:
        ValueError: the format or the level is unknown.
    """
    if log_format not in FORMATS:
        raise ValueError(f"log_format is {log_format!r}; it must be one of {', '.join(FORMATS)}")
    if level.upper() not in logging.getLevelNamesMapping():
        raise ValueError(f"log_level is {level!r}; it must be one of DEBUG, INFO, WARNING, ERROR")
    _fields.clear()
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, _Formatter)]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_is_wanted)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


@contextmanager
def log_context(**fields: object) -> Iterator[None]:
    """Adds fields to every event that this task or thread logs inside the block.

    Raises:
        ValueError: a name is not one of FIELDS.
    """
    _check(fields)
    before = _context.get()
    _context.set({**before, **fields})
    try:
        yield
    finally:
        _context.set(before)


def set_fields(**fields: object) -> None:
    """Adds fields to every event that this process logs for machines from now on; people read them in the sentences.

    Raises:
        ValueError: a name is not one of FIELDS.
    """
    _check(fields)
    _fields.update(fields)


def register_secret(text: str) -> None:
    """Keeps a text out of all logs from now on."""
    if text:
        _secrets.add(text)


def notice(sentence: str, logger: str) -> str:
    """Returns a line for standard error that can't be logged: the sentence, or an event where machines read the log."""
    record = logging.LogRecord(logger, logging.WARNING, "", 0, sentence, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _JsonFormatter):
            return handler.formatter.format(record)
    return sentence


def _check(fields: Mapping[str, object]) -> None:
    if unknown := sorted(fields.keys() - set(FIELDS)):
        raise ValueError(f"log context {', '.join(unknown)} is unknown; known: {', '.join(FIELDS)}")


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] not in _QUIET


class ChangeLogger:
    """Logs a sentence only when it differs from the last one about the same thing."""

    def __init__(self, logger: logging.Logger, level: int = logging.INFO) -> None:
        """Starts with nothing logged."""
        self._logger = logger
        self._level = level
        self._last: dict[str, str] = {}

    def log_if_changed(self, key: str, sentence: str) -> bool:
        """Logs the sentence unless it is the last one logged for `key`; returns whether it was logged."""
        if self._last.get(key) == sentence:
            return False
        self._last[key] = sentence
        self._logger.log(self._level, "%s", sentence, stacklevel=2)
        return True

    def forget(self, key: str) -> None:
        """Makes the next sentence for `key` new."""
        self._last.pop(key, None)


class _Formatter(logging.Formatter):
    """What both formats share."""

    def message(self, record: logging.LogRecord) -> str:
        """Returns the event's sentence without secrets."""
        return redacted(record.getMessage())

    def traceback(self, record: logging.LogRecord) -> str:
        """Returns the traceback without secrets; empty when there is none."""
        return redacted(self.formatException(record.exc_info)) if record.exc_info else ""

    def context(self, fields: Mapping[str, object] = MappingProxyType({})) -> dict[str, object]:
        """Returns the context's fields, and others where it has none, in the order of FIELDS, without secrets."""
        context = {**fields, **_context.get()}
        plain = {name: context[name] for name in FIELDS if context.get(name) is not None}
        return {
            name: value if isinstance(value, int | float) else redacted(str(value)) for name, value in plain.items()
        }


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        context = "".join(f" {name}={_one_line(str(value))}" for name, value in self.context().items())
        traceback = self.traceback(record)
        line = f"{_time(record)} {record.levelname} {record.name}: {_one_line(self.message(record))}{context}"
        return f"{line}\n{traceback}" if traceback else line


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": self.message(record),
            **self.context(_fields | {name: value for name, value in vars(record).items() if name in FIELDS}),
        }
        if traceback := self.traceback(record):
            event["traceback"] = traceback
        return json.dumps(event)


def redacted(text: str) -> str:
    """Returns a text without what was registered as secret."""
    for secret in _secrets:
        text = text.replace(secret, _REDACTED)
    return text


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
