"""Single values of a configuration: plain value or text to typed value, and back to plain.  [core]

A plain value is what JSON and YAML can hold: text, whole and finite numbers, true, false, nothing, lists, mappings.
"""

import json
import math
import re
import types
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Union, get_args, get_origin

_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(us|ms|s|m|h)?\s*")
_UNIT_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_FLAG_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_SHOWN_CHARACTERS = 60


def read_scalar(annotation: Any, value: object) -> object:
    """Returns a plain value as the type that a field calls for.

    Raises:
        ValueError: it isn't of that type; the text completes "must be".
        TypeError: fields of this type aren't supported.
    """
    if annotation not in _SCALARS:
        raise TypeError(f"a configuration can't hold fields of type {annotation}")
    expected, reader = _SCALARS[annotation]
    try:
        return reader(value)
    except (ValueError, OverflowError):
        raise ValueError(expected) from None


def parse_text(annotation: Any, text: str) -> object:
    """Turns the text of a flag or an environment variable into the plain value that its type calls for.

    Text that doesn't fit stays text, so that `ayni.settings.from_mapping` refuses it with its path.
    """
    possible = arms(annotation)
    if type(None) in possible and text.lower() in ("", "none"):
        return None
    arm = next(arm for arm in possible if arm is not type(None))
    origin = get_origin(arm) or arm
    if origin in (list, tuple):
        return [parse_text(get_args(arm)[0], part.strip()) for part in text.split(",") if part.strip()]
    try:
        return _TEXT_READERS.get(origin, str)(text)
    except ValueError:
        return text


def to_plain(value: object) -> object:
    """Returns a value that is not a dataclass as plain value; durations are seconds."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def arms(annotation: Any) -> tuple[Any, ...]:
    """Returns the types that a union is made of; any other type alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def wrong(path: str, expected: str, value: object) -> str:
    """Returns the sentence that says which value is wrong, what is expected and what was found."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[: _SHOWN_CHARACTERS - 3] + "..."
    return f"{path or 'the configuration'} must be {expected}; found {shown} ({_kind(value)})"


def _text(value: object) -> str:
    return value if isinstance(value, str) else _refuse()


def _flag(value: object) -> bool:
    return value if isinstance(value, bool) else _refuse()


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else _refuse()


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return float(_refuse())
    return float(value)


def _duration(value: object) -> timedelta:
    if isinstance(value, str):
        match = _DURATION.fullmatch(value) or _refuse()
        return timedelta(seconds=float(match[1]) * _UNIT_SECONDS[match[2]])
    seconds = _number(value)
    return timedelta(seconds=seconds if seconds >= 0 else _refuse())


def _anything(value: object) -> object:
    if isinstance(value, Mapping):
        return {_text(key): _anything(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_anything(item) for item in value]
    return value if value is None or isinstance(value, str | bool | int) else _number(value)


def _refuse() -> Any:
    raise ValueError


def _flag_word(text: str) -> object:
    return _FLAG_WORDS.get(text.lower(), text)


_SCALARS: dict[Any, tuple[str, Callable[[object], object]]] = {
    str: ("text", _text),
    bool: ("true or false", _flag),
    int: ("a whole number", _whole),
    float: ("a finite number", _number),
    timedelta: ("a duration such as 1.5 (seconds), 500ms, 2s or 5m", _duration),
    Path: ("a path", lambda value: Path(_text(value))),
    object: ("a plain value", _anything),
    Any: ("a plain value", _anything),
}

_TEXT_READERS: dict[Any, Callable[[str], object]] = {bool: _flag_word, int: int, float: float, dict: json.loads}


def _kind(value: object) -> str:
    kinds: list[tuple[Any, str]] = [
        (type(None), "nothing"),
        (bool, "true or false"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "text"),
        (list | tuple, "a list"),
        (Mapping, "a mapping"),
    ]
    return next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)
