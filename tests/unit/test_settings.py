"""Mapping to dataclasses and back; every problem of a file at once."""

import json
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ayni.plain_values import parse_text
from ayni.run_config import BatchConfig, RunConfig
from ayni.settings import SettingsError, from_mapping, leaves, to_mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    samples: int = 1
    rate: float = 0.5
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}; it must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    host: str
    on: bool = False
    wait: timedelta = timedelta(seconds=10)
    folder: Path = Path(".")
    file: Path | None = None
    limit: int | None = None
    mode: Literal["fast", "exact"] = "exact"
    options: dict[str, object] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    inner: Inner = field(default_factory=lambda: Inner(samples=8))
    extra: Inner | None = None


def problems(values: object, cls: type = Outer) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        from_mapping(cls, values)  # type: ignore[arg-type]
    return caught.value.problems


def test_every_kind_of_value() -> None:
    values = {
        "host": "h",
        "on": True,
        "wait": "500ms",
        "folder": "a/b",
        "file": "c",
        "limit": 3,
        "mode": "fast",
        "options": {"deep": [1, {"x": None}]},
        "weights": {"a": 1},
        "words": ["x", "y"],
        "inner": {"rate": 2, "names": ["n"]},
        "extra": {"samples": 5},
    }
    assert from_mapping(Outer, values) == Outer(
        host="h",
        on=True,
        wait=timedelta(milliseconds=500),
        folder=Path("a/b"),
        file=Path("c"),
        limit=3,
        mode="fast",
        options={"deep": [1, {"x": None}]},
        weights={"a": 1.0},
        words=["x", "y"],
        inner=Inner(samples=8, rate=2.0, names=("n",)),
        extra=Inner(samples=5),
    )


def test_defaults_fill_what_is_left_out() -> None:
    assert from_mapping(Outer, {"host": "h"}) == Outer(host="h")
    assert from_mapping(Outer, {"host": "h", "file": None, "extra": None}) == Outer(host="h")


def test_numbers_become_what_the_field_is() -> None:
    rate = from_mapping(Inner, {"rate": 1}).rate
    assert (rate, type(rate)) == (1.0, float)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(1.5, 1.5), (0, 0), ("500ms", 0.5), ("2s", 2), ("5m", 300), ("1.5 h", 5400), ("250us", 0.00025), ("3", 3)],
)
def test_durations(value: object, seconds: float) -> None:
    assert from_mapping(Outer, {"host": "h", "wait": value}).wait == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "value", [-1, "-1s", "s", "2 weeks", "", True, None, float("inf"), float("nan"), "1e999s", [1]]
)
def test_what_is_no_duration(value: object) -> None:
    (problem,) = problems({"host": "h", "wait": value})
    assert problem.startswith("wait must be a duration such as 1.5 (seconds), 500ms, 2s or 5m; found ")


def test_all_problems_of_a_file_come_at_once_with_their_paths() -> None:
    values = {
        "on": 1,
        "wiat": 3,
        "limit": True,
        "mode": "quick",
        "weights": {"a": "b"},
        "words": "x",
        "options": {"deep": {1: 2}},
        "inner": {"sampels": 3, "rate": float("nan"), "names": ["a", 2]},
        "extra": [],
    }
    assert problems(values) == (
        "wiat is not a known name; did you mean wait?",
        "host is missing; it has no default",
        "on must be true or false; found 1 (a whole number)",
        "limit must be a whole number; found True (true or false)",
        "mode must be one of fast, exact; found 'quick' (text)",
        "options.deep must be a plain value; found {1: 2} (a mapping)",
        "weights.a must be a finite number; found 'b' (text)",
        "words must be a list; found 'x' (text)",
        "inner.sampels is not a known name; did you mean inner.samples?",
        "inner.rate must be a finite number; found nan (a number)",
        "inner.names[1] must be text; found 2 (a whole number)",
        "extra must be a mapping with samples, rate, names; found [] (a list)",
    )


def test_the_message_lists_all_problems() -> None:
    with pytest.raises(ValueError, match=r"^host is missing; it has no default\non must be true or false; found 'x'"):
        from_mapping(Outer, {"on": "x"})


def test_a_name_like_no_other_gets_the_list() -> None:
    assert problems({"zzz": 1}, Inner) == ("zzz is not a known name; known names: samples, rate, names",)
    assert problems({3: 1}, Inner) == ("3 is not a known name; known names: samples, rate, names",)


def test_what_a_class_refuses_comes_with_its_path() -> None:
    refusal = "inner: samples is 0; it must be at least 1"
    assert problems({"host": "h", "inner": {"samples": 0}, "on": 3})[1] == refusal
    assert problems({"samples": 0}, Inner) == ("samples is 0; it must be at least 1",)
    assert problems({"batch": {"samples": 0}}, RunConfig) == ("batch.samples is 0; it must be 1 to 2147483648",)


def test_what_is_no_mapping() -> None:
    assert problems([1], Inner) == (
        "the configuration must be a mapping with samples, rate, names; found [1] (a list)",
    )
    assert problems({"host": "h", "inner": None}) == (
        "inner must be a mapping with samples, rate, names; found None (nothing)",
    )


def test_long_values_are_shown_in_part() -> None:
    (problem,) = problems({"samples": "x" * 1000}, Inner)
    assert len(problem) < 120


def test_a_field_of_another_type_is_our_own_mistake() -> None:
    @dataclass(frozen=True)
    class Odd:
        value: bytes = b""

    with pytest.raises(TypeError, match="fields of type <class 'bytes'>"):
        from_mapping(Odd, {"value": "x"})


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
durations = st.timedeltas(timedelta(0), timedelta(days=10_000))
finite = st.floats(allow_nan=False, allow_infinity=False)
inners = st.builds(Inner, samples=st.integers(1), rate=finite, names=st.lists(st.text()).map(tuple))
outers = st.builds(
    Outer,
    host=st.text(),
    on=st.booleans(),
    wait=durations,
    folder=st.text("ab/.").map(Path),
    file=st.none() | st.text("ab/.").map(Path),
    limit=st.none() | st.integers(),
    options=st.dictionaries(st.text(), plain),
    weights=st.dictionaries(st.text(), finite),
    words=st.lists(st.text()),
    inner=inners,
    extra=st.none() | inners,
)


@settings(max_examples=30)
@given(outers)
def test_there_and_back_through_json(config: Outer) -> None:
    assert from_mapping(Outer, json.loads(json.dumps(to_mapping(config)))) == config


@settings(max_examples=50)
@given(plain)
def test_any_content_is_built_or_refused(values: object) -> None:
    for cls in (Outer, Inner):
        try:
            assert isinstance(from_mapping(cls, values), cls)  # type: ignore[arg-type]
        except SettingsError:
            continue


def test_the_run_file_there_and_back() -> None:
    config = RunConfig(run_id="r", batch=BatchConfig(samples=7))
    assert from_mapping(RunConfig, to_mapping(config)) == config


def test_leaves_name_every_value_with_its_default() -> None:
    found = {leaf.path: leaf for leaf in leaves(Outer)}
    assert list(found)[-7:] == [
        "words",
        "inner.samples",
        "inner.rate",
        "inner.names",
        "extra.samples",
        "extra.rate",
        "extra.names",
    ]
    assert found["host"].default is MISSING
    assert (found["inner.samples"].default, found["extra.samples"].default) == (8, 1)
    assert (found["wait"].default, found["inner.names"].default, found["inner.names"].name) == (10.0, [], "names")
    assert {leaf.name for leaf in leaves(Inner)} == {field.name for field in fields(Inner)}


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "3", 3),
        (int, "3x", "3x"),
        (float, "1e-3", 0.001),
        (bool, "yes", True),
        (bool, "0", False),
        (bool, "maybe", "maybe"),
        (str, "3", "3"),
        (timedelta, "5m", "5m"),
        (Path | None, "none", None),
        (Path | None, "a", "a"),
        (int | None, "", None),
        (list[str], "a, b,,", ["a", "b"]),
        (tuple[int, ...], "1,2", [1, 2]),
        (dict[str, object], '{"a": 1}', {"a": 1}),
        (dict, "{", "{"),
    ],
)
def test_text_of_flags_and_variables(annotation: object, text: str, value: object) -> None:
    assert parse_text(annotation, text) == value
