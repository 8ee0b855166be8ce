"""Configuration values: a mapping becomes frozen dataclasses, and back.  [core]

Theory of operation. A configuration is a dataclass whose fields are text, numbers, true or false, durations, paths,
lists, mappings or further such dataclasses. `from_mapping` walks the mapping and the class side by side and collects
every problem before it raises, so that one look at the message is enough to repair a file. A field's own default fills
what the mapping leaves out. `to_mapping` gives plain values that JSON and YAML can hold and that `from_mapping` reads
back.

What is ugly: annotations are looked at while the program runs, so only the kinds named above are supported.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ayni.plain_values import arms, read_scalar, to_plain, wrong

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_NEAR_ENOUGH = 0.6


class SettingsError(ValueError):
    """The operator's mistakes, all of them at once.

    Attributes:
        problems: one sentence each.
    """

    def __init__(self, *problems: str) -> None:
        """Keeps the sentences; the message is one line for each."""
        super().__init__("\n".join(problems))
        self.problems = problems


def from_mapping(cls: type[T], values: Mapping[str, object]) -> T:
    """Builds a configuration from plain values.

    Raises:
        SettingsError: names that are unknown or missing, values of the wrong type, and what `__post_init__` refuses;
            every problem with its path.
    """
    problems: list[str] = []
    config = _build(cls, values, "", problems, None)
    if problems:
        raise SettingsError(*problems)
    assert isinstance(config, cls)
    return config


def to_mapping(config: "DataclassInstance") -> dict[str, object]:
    """Returns a configuration as plain values; durations are seconds."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config) if field.init}


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One value of a configuration class, however deeply nested."""

    path: str
    """Names from the outermost class to the value, joined by dots."""
    owner: type
    """Class that has the field."""
    annotation: Any
    """Type of the field."""
    default: object
    """Plain default value; `dataclasses.MISSING` where the value is required."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hint:
    """What a value may be taken from where nobody has given it."""

    text: str
    """The value, as the text of a flag would give it."""
    origin: str
    """Where it came from, for people."""
    problem: str = ""
    """Why there is no value there, and what to do; empty where there is one."""


def leaves(cls: "type[DataclassInstance]", prefix: str = "", base: object = None) -> list[Leaf]:
    """Returns every single value of a configuration class, in the order of declaration."""
    found: list[Leaf] = []
    for field, annotation in _annotated_fields(cls):
        default = _default(field, base)
        inner = _inner_class(annotation)
        if inner is not None:
            found += leaves(inner, f"{prefix}{field.name}.", default if _is_config(default) else None)
        else:
            plain = default if default is MISSING else _plain(default)
            found.append(Leaf(path=prefix + field.name, owner=cls, annotation=annotation, default=plain))
    return found


def _build(cls: "type[DataclassInstance]", values: object, path: str, problems: list[str], base: object) -> object:
    annotated = _annotated_fields(cls)
    known = [field.name for field, _ in annotated]
    if not isinstance(values, Mapping):
        problems.append(wrong(path, f"a mapping with {_listed(known)}", values))
        return None
    before = len(problems)
    problems += [_unknown(path, str(key), known) for key in values if key not in known]
    built = {}
    for field, annotation in annotated:
        default, here = _default(field, base), _join(path, field.name)
        if field.name in values:
            built[field.name] = _convert(annotation, values[field.name], here, problems, default)
        elif default is MISSING:
            problems.append(f"{here} is missing; it has no default")
    return _construct(cls, built, path, problems, base) if len(problems) == before else None


def _construct(
    cls: "type[DataclassInstance]", built: dict[str, object], path: str, problems: list[str], base: Any
) -> object:
    try:
        return cls(**built) if base is None else replace(base, **built)
    except ValueError as error:
        problems.append(str(error) if str(error).startswith(path) else f"{path}: {error}")
        return None


def _convert(annotation: Any, value: object, path: str, problems: list[str], default: object = None) -> object:
    inner = _inner_class(annotation)
    origin = get_origin(annotation) or annotation
    if value is None and type(None) in arms(annotation):
        return None
    if inner is not None:
        return _build(inner, value, path, problems, default if _is_config(default) else None)
    if len(arms(annotation)) > 1:
        return _first_arm(annotation, value, path, problems)
    if origin in (list, tuple):
        return _sequence(annotation, value, path, problems)
    if origin is dict:
        return _mapping(annotation, value, path, problems)
    return _scalar(annotation, value, path, problems)


def _first_arm(annotation: Any, value: object, path: str, problems: list[str]) -> object:
    refusals: list[str] = []
    for arm in (arm for arm in arms(annotation) if arm is not type(None)):
        found: list[str] = []
        result = _convert(arm, value, path, found)
        if not found:
            return result
        refusals += found
    problems += refusals
    return None


def _sequence(annotation: Any, value: object, path: str, problems: list[str]) -> object:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        problems.append(wrong(path, "a list", value))
        return None
    item = get_args(annotation)[0]
    items = [_convert(item, element, f"{path}[{index}]", problems) for index, element in enumerate(value)]
    return tuple(items) if get_origin(annotation) is tuple else items


def _mapping(annotation: Any, value: object, path: str, problems: list[str]) -> object:
    if not isinstance(value, Mapping):
        problems.append(wrong(path, "a mapping", value))
        return None
    item = (get_args(annotation) or (str, object))[1]
    problems += [wrong(path, "a mapping with text keys", key) for key in value if not isinstance(key, str)]
    return {key: _convert(item, element, _join(path, str(key)), problems) for key, element in value.items()}


def _scalar(annotation: Any, value: object, path: str, problems: list[str]) -> object:
    if get_origin(annotation) is Literal:
        if value not in get_args(annotation):
            problems.append(wrong(path, f"one of {_listed(map(str, get_args(annotation)))}", value))
        return value
    try:
        return read_scalar(annotation, value)
    except ValueError as error:
        problems.append(wrong(path, str(error), value))
        return None


def _plain(value: object) -> object:
    return to_mapping(value) if is_dataclass(value) and not isinstance(value, type) else to_plain(value)


def _annotated_fields(cls: "type[DataclassInstance]") -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(field, hints[field.name]) for field in fields(cls) if field.init]


def _default(field: Field[Any], base: object) -> object:
    if base is not None:
        return getattr(base, field.name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _inner_class(annotation: Any) -> "type[DataclassInstance] | None":
    kinds = [arm for arm in arms(annotation) if arm is not type(None)]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]) else None


def _is_config(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _unknown(path: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR_ENOUGH)
    hint = f"did you mean {_join(path, near[0])}?" if near else f"known names: {_listed(known)}"
    return f"{_join(path, name)} is not a known name; {hint}"
