"""One configuration from the command line, the environment and a file.  [shell]

A field of a configuration class is written once: its name is the flag (`batch.samples`: --batch-samples) and the
environment variable (AYNI_BATCH_SAMPLES), the text under it is the help. A flag wins over the environment, that over
the file, and that over the default. An empty environment variable counts as unset. Hints, which a program may have from
elsewhere, stand between the file and the default.
"""

import argparse
import ast
import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args, get_origin

from ayni.plain_values import arms, parse_text
from ayni.process import WRONG_USE, load_yaml
from ayni.settings import Hint, Leaf, SettingsError, from_mapping, leaves, to_mapping

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_METAVARS = {int: "N", float: "X", timedelta: "DURATION", Path: "PATH", list: "A,B", tuple: "A,B", dict: "JSON"}


Hints = Callable[[Mapping[str, Any]], Mapping[str, Hint]]
"""Gets the values that were given, nested; returns hints by path."""


def no_hints(_: Mapping[str, Any]) -> Mapping[str, Hint]:
    """Returns no hints."""
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(Generic[T]):
    """A configuration, and where each value of it came from."""

    config: T
    """The configuration."""
    origins: dict[str, str]
    """For each path: the flag, the environment variable, the file, the origin of a hint or "default"."""
    hinted: tuple[str, ...] = ()
    """Paths whose values came from hints."""

    def hinted_values(self) -> dict[str, object]:
        """Returns the values that came from hints, by path."""
        return {path: _look_up(to_mapping(self.config), path) for path in self.hinted}


def read_command_line(
    cls: type[T],
    arguments: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    description: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> T:
    """Returns the configuration that a process was started with.

    Prints and exits where that is asked for (--help, --print-config: 0) or where it can't go on (wrong use: 2).
    """
    parser = argparse.ArgumentParser(prog, "%(prog)s [options]", description, allow_abbrev=False)
    return resolve_or_exit(parser, cls, arguments, environ).config


def read_environment(cls: type[T], environ: Mapping[str, str] = os.environ) -> T:
    """Returns the configuration of a program that has a command line of its own: from the environment, and its file.

    Thread-safe, and needs no source text: compilers of Python 3.11 must not run on several threads at once.

    Raises:
        SettingsError: all that is wrong, with paths and origins.
    """
    nothing = argparse.Namespace(config=None, **{leaf.path: None for leaf in leaves(cls)})
    return resolve(cls, nothing, environ).config


def resolve_or_exit(
    parser: argparse.ArgumentParser,
    cls: type[T],
    arguments: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    hints: Hints = no_hints,
) -> Resolved[T]:
    """Returns the configuration that a process was started with, and where each value of it came from.

    Prints and exits where that is asked for (--help, --print-config: 0) or where it can't go on (wrong use: 2).
    """
    add_flags(parser, cls)
    given = parser.parse_args(arguments)
    try:
        resolved = resolve(cls, given, environ, hints)
    except SettingsError as error:
        parser.exit(WRONG_USE, "".join(f"{parser.prog}: {problem}\n" for problem in error.problems))
    if given.print_config:
        print(describe(resolved))
        parser.exit(0)
    return resolved


def add_flags(parser: argparse.ArgumentParser, cls: "type[DataclassInstance]") -> None:
    """Adds a flag for each value of a configuration class, and --config and --print-config."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with values (environment: AYNI_CONFIG)")
    parser.add_argument("--print-config", action="store_true", help="print all values and their origins, then exit")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for leaf in leaves(cls):
        section = leaf.path.rpartition(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(section or "values")
        groups[section].add_argument(_flag(leaf.path), dest=leaf.path, help=_help(leaf), **_action(leaf))


def resolve(
    cls: type[T], given: argparse.Namespace, environ: Mapping[str, str], hints: Hints = no_hints
) -> Resolved[T]:
    """Joins the flags that `add_flags` added, the environment, the file and the hints.

    Raises:
        SettingsError: all that is wrong, with paths and origins.
    """
    file = given.config or environ.get("AYNI_CONFIG") or None
    values = load_yaml(Path(file)) if file else {}
    origins = {leaf.path: _origin(leaf.path, values, given, environ, file) for leaf in leaves(cls)}
    for leaf in leaves(cls):
        if origins[leaf.path] == _flag(leaf.path):
            _place(values, leaf.path, _from_flag(leaf, getattr(given, leaf.path)))
        elif origins[leaf.path] == _variable(leaf.path):
            _place(values, leaf.path, parse_text(leaf.annotation, environ[_variable(leaf.path)]))
    taken = {path: hint for path, hint in hints(values).items() if origins[path] == "default"}
    if problems := [f"{path}: {hint.problem}" for path, hint in taken.items() if hint.problem]:
        raise SettingsError(*problems)
    for leaf in (leaf for leaf in leaves(cls) if leaf.path in taken):
        origins[leaf.path] = taken[leaf.path].origin
        _place(values, leaf.path, parse_text(leaf.annotation, taken[leaf.path].text))
    try:
        return Resolved(config=from_mapping(cls, values), origins=origins, hinted=tuple(taken))
    except SettingsError as error:
        raise SettingsError(*(_located(problem, origins, file) for problem in error.problems)) from None


def describe(resolved: "Resolved[Any]") -> str:
    """Returns one line for each value: its path, the value without passwords, and where it came from."""
    plain = to_mapping(resolved.config)
    lines = [
        (path, _without_password(json.dumps(_look_up(plain, path), default=str)), origin)
        for path, origin in resolved.origins.items()
    ]
    width = max((len(path) + len(value) for path, value, _ in lines), default=0)
    return "\n".join(f"{f'{path} = {value}':{width + 3}}  # {origin}" for path, value, origin in lines)


@lru_cache(maxsize=64)
def field_texts(cls: type) -> dict[str, str]:
    """Returns the text literal under each field of a class, for the class and those that it extends."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if is_dataclass(owner):
            texts |= _own_texts(owner)
    return texts


def _own_texts(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            texts[field.target.id] = " ".join(below.value.value.split())
    return texts


def _without_password(text: str) -> str:
    """Returns the text with the password of an address left out: scheme://USER:PASSWORD@HOST, or ?password=..."""
    return re.sub(r"(password=)[^&\"]*", r"\1***", re.sub(r"(://[^:@/]*):.*@", r"\1:***@", text))


def _flag(path: str) -> str:
    return "--" + path.replace(".", "-").replace("_", "-")


def _variable(path: str) -> str:
    return "AYNI_" + path.replace(".", "_").upper()


def _kind(leaf: Leaf) -> Any:
    kind = next(arm for arm in arms(leaf.annotation) if arm is not type(None))
    return get_origin(kind) or kind


def _action(leaf: Leaf) -> dict[str, Any]:
    kind = _kind(leaf)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind is Literal:
        return {"choices": get_args(leaf.annotation)}
    return {"action": "append" if kind in (list, tuple) else "store", "metavar": _METAVARS.get(kind, "TEXT")}


def _help(leaf: Leaf) -> str:
    return f"{field_texts(leaf.owner).get(leaf.name, '')} ({_shown_default(leaf)})".replace("%", "%%").strip()


def _shown_default(leaf: Leaf) -> str:
    if leaf.default is MISSING:
        return "required"
    if leaf.default is None or leaf.default in ("", [], {}):
        return "default: none"
    shown = f"{leaf.default:g}s" if _kind(leaf) is timedelta else leaf.default
    return f"default: {shown if isinstance(shown, str) else json.dumps(shown)}"


def _origin(
    path: str, values: Mapping[str, object], given: argparse.Namespace, environ: Mapping[str, str], file: str | None
) -> str:
    if getattr(given, path) is not None:
        return _flag(path)
    if environ.get(_variable(path)):
        return _variable(path)
    return str(file) if _look_up(values, path) is not MISSING else "default"


def _from_flag(leaf: Leaf, value: Any) -> object:
    if isinstance(value, bool):
        return value
    return parse_text(leaf.annotation, ",".join(value) if isinstance(value, list) else value)


def _look_up(values: object, path: str) -> object:
    for name in path.split("."):
        if not isinstance(values, Mapping) or name not in values:
            return MISSING
        values = values[name]
    return values


def _place(values: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[name] = value


def _located(problem: str, origins: Mapping[str, str], file: str | None) -> str:
    origin = origins.get(problem.partition(" ")[0], file or "default")
    return problem if origin == "default" else f"{problem} [{origin}]"
