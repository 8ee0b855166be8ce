"""A run's wire type: it becomes narrower or stays, and is what its store and its file say."""

import math
import re
from typing import Any

import pytest

from ayni.settings import SettingsError, from_mapping
from coordinator_service.config import RunFile
from coordinator_service.wire_types import WireTypes, narrower_than


def test_a_run_keeps_the_type_of_its_file():
    types = WireTypes("bfloat16", {})
    assert [types.at(step) for step in (0, 7, 3)] == ["bfloat16"] * 3
    assert types.now == "bfloat16"


def test_what_was_chosen_outlives_a_restart_and_steps_that_are_made_again():
    types = WireTypes("float32", {})
    assert types.at(20) == "float32"
    types.choose("bfloat16")
    assert [types.at(step) for step in (21, 5)] == ["bfloat16"] * 2
    assert types.exchange_before_s == math.inf
    again = WireTypes("float32", {}, "bfloat16", repr(0.1))
    assert again.exchange_before_s == 0.1
    assert (again.now, again.at(0)) == ("bfloat16", "bfloat16")
    again.choose("int8")
    assert again.now == "int8"


@pytest.mark.parametrize(
    ("now", "wider"), [("bfloat16", "float32"), ("int8", "bfloat16"), ("int8", "int8"), ("float32", "float16")]
)
def test_a_type_never_becomes_a_wider_one(now, wider):
    with pytest.raises(AssertionError):
        WireTypes(now, {}).choose(wider)


def test_changes_that_were_said_beforehand_come_with_their_steps():
    types = WireTypes("float32", {"10": "int8", "9": "bfloat16"})
    assert types.now == "float32"
    assert [types.at(step) for step in (0, 8, 9, 10, 11)] == ["float32", "float32", "bfloat16", "int8", "int8"]


def test_changes_that_were_said_make_no_type_a_wider_one():
    assert WireTypes("float32", {"3": "bfloat16"}, "int8").at(5) == "int8"


def test_every_type_has_narrower_ones_or_none():
    assert {name: narrower_than(name) for name in ("float32", "bfloat16", "float16", "int8")} == {
        "float32": ["bfloat16", "int8"],
        "bfloat16": ["int8"],
        "float16": ["int8"],
        "int8": [],
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"wire_changes": {"-1": "int8"}}, "'-1' is no step"),
        ({"wire_changes": {"x": "int8"}}, "'x' is no step"),
        ({"wire_changes": {"3": "uint8"}}, "after float32 it may be: bfloat16, int8"),
        (
            {"wire_changes": {"3": "int8", "12": "bfloat16"}},
            "wire_changes.12 is 'bfloat16'; after int8 it may be: none",
        ),
        ({"wire_type": "int8", "wire_changes": {"3": "int8"}}, "after int8 it may be: none"),
        ({"auto_wire": True, "exchange_share": 0}, "auto_wire needs an exchange_share above 0"),
        ({"auto_wire": True, "wire_changes": {"3": "int8"}}, "exclude one another"),
    ],
)
def test_a_run_file_that_makes_no_sense_is_refused(values: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=re.escape(words)):
        from_mapping(RunFile, values)


def test_a_run_file_may_say_changes():
    file = from_mapping(RunFile, {"wire_changes": {"12": "int8", "3": "bfloat16"}})
    assert WireTypes(file.wire_type, file.wire_changes).at(4) == "bfloat16"
