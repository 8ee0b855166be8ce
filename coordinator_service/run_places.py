"""Where a run's state is, as the commands that read it are told.  [shell]"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ayni.settings import SettingsError
from coordinator_service.store import RunStore, open_database, open_folder


def add_places(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name a run's state."""
    parser.add_argument("--run", type=Path, metavar="DIR", help="the run's folder: state_dir/run_id")
    parser.add_argument("--database", metavar="URL", help="database that keeps the run instead: postgresql://...")
    parser.add_argument("--run-id", help="name of the run in the database")


def open_place(given: argparse.Namespace) -> RunStore:
    """Opens the named state to read it, also while the run goes on.

    Raises:
        SettingsError: the flags don't name one place.
        OSError: there is no run, or it can't be read.
    """
    if bool(given.run) == bool(given.database) or bool(given.database) != bool(given.run_id):
        raise SettingsError("give --run DIR, or --database URL and --run-id ID")
    if given.database:
        return open_database(given.database, given.run_id, to_read=True)
    if given.run.is_file():
        raise SettingsError(f"{given.run} is a file; give the run's folder: --run {given.run.parent}")
    return open_folder(given.run, to_read=True)


def read_span(text: str) -> range:
    """Returns steps a to b-1 of "a:b"; a left-out end is open.

    Raises:
        SettingsError: it is not a span, or there is nothing in it.
    """
    first, colon, stop = text.partition(":")
    if not colon or not (first or "0").isdecimal() or not (stop or "0").isdecimal():
        raise SettingsError(f"{text!r} is not a span of steps; write FIRST:STOP, as in 10:20 for steps 10 to 19")
    span = range(int(first or 0), int(stop or 1 << 62))
    if not span:
        raise SettingsError(f"there is no step in {text!r}; STOP is one past the last, as in 10:20 for steps 10 to 19")
    return span


def with_database(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with `--state URL` written as `--database URL`."""
    given = list(arguments)
    for at, argument in enumerate(given):
        flag, equals, value = argument.partition("=")
        if flag == "--state" and "://" in (value if equals else "".join(given[at + 1 : at + 2])):
            given[at] = f"--database{equals}{value}"
    return given
