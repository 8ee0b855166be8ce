"""Life of a process: its exit code, the signals that end it, the join token and YAML files.  [shell]"""

import asyncio
import logging
import os
import re
import signal
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from ayni.errors import AyniError
from ayni.logs import notice, register_secret
from ayni.settings import SettingsError

logger = logging.getLogger(__name__)

DONE = 0
FAILED = 1
WRONG_USE = 2
TEMPORARY = 75
"""Exit code that lets a supervisor start the process again."""

SHORTEST_TOKEN = 16
"""Characters that a join token has at least."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal has told the process to stop.

    Not a KeyboardInterrupt: Python remembers one that passes through an `exec` of text, and ends the process by SIGINT
    although it was caught.
    """


class TemporaryFailure(Exception):
    """The process can't go on now, but may succeed when it is started again."""


def exit_code_of(main: Callable[[], int | None]) -> int:
    """Runs a process's work and returns its exit code; what it raises is logged in one sentence.

    Only an error that nobody foresaw is logged with its traceback.
    """
    try:
        return main() or DONE
    except SettingsError as error:
        for problem in error.problems:
            logger.error("%s", problem)
        return WRONG_USE
    except TemporaryFailure as error:
        logger.error("%s", error)
        return TEMPORARY
    except (AyniError, OSError) as error:
        logger.error("%s", error)
        logger.debug("traceback", exc_info=True)
    except (KeyboardInterrupt, Stopped):
        logger.error("interrupted")
    except Exception:
        logger.exception("unexpected error")
    return FAILED


@contextmanager
def on_signal(stop: Callable[[str], None]) -> Iterator[None]:
    """Calls `stop` with the signal's name at the first SIGINT or SIGTERM; at the second one the process exits at once.

    For the main thread. `stop` is called between two instructions of that thread, so it may only set a flag, or
    raise `Stopped`.
    """
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        if received:
            os._exit(FAILED)
        received.append(number)
        name = signal.Signals(number).name
        line = notice(f"{name}: stopping; again to exit at once", __name__)
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())
        stop(name)

    before = {number: signal.signal(number, receive) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop(asyncio.Event):
    """Set when a signal has told the process to stop."""

    signal = ""
    """Which one: "SIGINT" or "SIGTERM"."""


def run_until_signal(main: Callable[[Stop], Awaitable[int | None]]) -> int:
    """Runs a service on a new event loop and returns the process's exit code.

    Args:
        main: gets an event that SIGINT or SIGTERM sets; it then ends by itself.
    """

    async def supervised() -> int | None:
        stop = Stop()
        loop = asyncio.get_running_loop()

        def wake(name: str) -> None:
            stop.signal = name
            loop.call_soon_threadsafe(stop.set)

        with on_signal(wake):
            return await main(stop)

    return exit_code_of(lambda: asyncio.run(supervised()))


def load_token(token_file: Path | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the join token from the file, else from AYNI_TOKEN_FILE, else from AYNI_TOKEN; logs never show it.

    Raises:
        SettingsError: there is none, or it is too short, malformed, or readable by every user of the machine.
    """
    file = token_file or (Path(environ["AYNI_TOKEN_FILE"]) if environ.get("AYNI_TOKEN_FILE") else None)
    if file is None and not environ.get("AYNI_TOKEN"):
        raise SettingsError("no join token: give --token-file, or set AYNI_TOKEN_FILE or AYNI_TOKEN")
    source = str(file) if file else "AYNI_TOKEN"
    token = (_read_secret(file) if file else environ["AYNI_TOKEN"]).strip()
    if not re.fullmatch(r"[!-~]*", token):
        raise SettingsError(f"the join token in {source} may have printable ASCII characters only, and no spaces")
    if len(token) < SHORTEST_TOKEN:
        raise SettingsError(
            f"the join token in {source} has {len(token)} characters; it needs {SHORTEST_TOKEN} or more"
            ' (python -c "import secrets; print(secrets.token_urlsafe())" makes one)'
        )
    register_secret(token)
    return token


def _read_secret(file: Path) -> str:
    try:
        if os.name == "posix" and file.stat().st_mode & stat.S_IROTH:
            raise SettingsError(f"every user of this machine can read the join token in {file}: run chmod 600 {file}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"can't read the join token in {file}: {_why(error)}") from None


def load_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping that a YAML file holds; an empty file is an empty mapping.

    Plain words have the meaning of YAML 1.2: only true and false are flags, 1e-3 is a number, 12:30 is text.

    Raises:
        SettingsError: the file can't be read, isn't YAML, gives a key twice, or doesn't hold a mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"can't read {path}: {_why(error)}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingsError(f"{path}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must hold a mapping of names to values; found {type(content).__name__}")
    return content


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


class _Loader(yaml.SafeLoader):
    """Reads the core schema of YAML 1.2 and refuses keys that are given twice."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key.value, str):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_NUMBER = r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan"

for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", _NUMBER, list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
