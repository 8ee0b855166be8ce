"""How commands are told where a run's state is, and which steps."""

import argparse

import pytest

from ayni.flags import Resolved, describe
from ayni.settings import SettingsError
from coordinator_service.config import RunFile
from coordinator_service.run_places import add_places, open_place, read_span, with_database

URL = "postgresql://ayni:secret@host/runs"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--fresh", "--state", URL], ["--fresh", "--database", URL]),
        ([f"--state={URL}", "--fresh"], [f"--database={URL}", "--fresh"]),
        (["--database", URL], ["--database", URL]),
        (["--state", "folder"], ["--state", "folder"]),
        (["--state=folder"], ["--state=folder"]),
        (["--state"], ["--state"]),
        (["--state-dir", URL], ["--state-dir", URL]),
    ],
)
def test_state_with_an_address_is_the_database(given, expected):
    assert with_database(given) == expected


@pytest.mark.parametrize(("text", "first", "stop"), [("2:5", 2, 5), (":5", 0, 5), ("0:1", 0, 1)])
def test_a_span_of_steps(text, first, stop):
    assert read_span(text) == range(first, stop)


def test_a_span_without_an_end_is_open():
    assert read_span("7:").start == 7
    assert 10**9 in read_span(":")


@pytest.mark.parametrize("text", ["", "5", "a:b", "-1:2", "1:2:3", "1.5:2"])
def test_what_is_no_span_is_refused(text):
    with pytest.raises(SettingsError, match="not a span of steps"):
        read_span(text)


@pytest.mark.parametrize(
    "flags",
    [[], ["--run", "x", "--database", URL, "--run-id", "y"], ["--database", URL], ["--run", "x", "--run-id", "y"]],
)
def test_one_place_must_be_named(flags):
    parser = argparse.ArgumentParser()
    add_places(parser)
    with pytest.raises(SettingsError, match="give --run DIR, or --database URL and --run-id ID"):
        open_place(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "postgresql://ayni:***@host/runs"),
        ("postgresql://ayni:se:cr@secret@host/runs", "postgresql://ayni:***@host/runs"),
        ("postgresql://host/runs?password=secret&user=x", "postgresql://host/runs?password=***&user=x"),
    ],
)
def test_a_printed_configuration_does_not_show_the_password(url, shown):
    text = describe(Resolved(config=RunFile(database=url), origins={"database": "--database"}))
    assert text == f'database = "{shown}"  # --database'


def test_an_address_without_a_password_is_printed_whole():
    text = describe(Resolved(config=RunFile(database="postgresql://ayni@host:5/runs"), origins={"database": "x"}))
    assert "postgresql://ayni@host:5/runs" in text
