"""YAML files, the join token and exit codes."""

import logging
import os
from pathlib import Path

import pytest

from ayni import logs
from ayni.errors import RunEnded
from ayni.process import Stopped, TemporaryFailure, exit_code_of, load_token, load_yaml
from ayni.settings import SettingsError

TOKEN = "sixteen-or-more-characters"


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "file"
    path.write_text(text)
    path.chmod(mode)
    return path


def yaml_refusal(path: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        load_yaml(path)
    return str(caught.value)


def test_yaml_words_mean_what_they_look_like(tmp_path: Path) -> None:
    text = """
run_id: no
rate: 1e-3
rates: [1.5, -2, .5, 1., 1E5, 7e+2, 0x1f, 017, 12:30, 1_000, 2024-01-01, "1"]
flags: [true, False, yes, off]
empty: [~, null, ]
nothing:
base: &base {a: 1}
more: {<<: *base, b: 2}
"""
    assert load_yaml(write(tmp_path, text)) == {
        "run_id": "no",
        "rate": 0.001,
        "rates": [1.5, -2, 0.5, 1.0, 1e5, 700.0, "0x1f", "017", "12:30", "1_000", "2024-01-01", "1"],
        "flags": [True, False, "yes", "off"],
        "empty": [None, None],
        "nothing": None,
        "base": {"a": 1},
        "more": {"a": 1, "b": 2},
    }


def test_an_empty_yaml_file_is_an_empty_mapping(tmp_path: Path) -> None:
    assert load_yaml(write(tmp_path, "# nothing yet\n")) == {}


def test_what_a_yaml_file_can_not_be(tmp_path: Path) -> None:
    path = write(tmp_path, "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n")
    assert yaml_refusal(path) == f"{path}, line 5: 'c' is given twice"
    assert yaml_refusal(write(tmp_path, "a: 1\nb: [1, 2\nc: 3\n")).startswith(f"{path}, line 3: ")
    assert yaml_refusal(write(tmp_path, "- a\n")) == f"{path} must hold a mapping of names to values; found list"
    assert yaml_refusal(write(tmp_path, "a: !!python/name:os.system x\n")).startswith(f"{path}, line 1: ")
    assert yaml_refusal(write(tmp_path, "a: &a [*a]\n? [x]\n: 1\n")).startswith(f"{path}, line 2: ")
    assert yaml_refusal(tmp_path / "none") == f"can't read {tmp_path / 'none'}: No such file or directory"
    path.write_bytes(b"a: \xff")
    assert yaml_refusal(path).startswith(f"can't read {path}: ")
    path.write_bytes(b"a: \x01")
    assert yaml_refusal(path).startswith(f"{path}: ")


def test_where_the_token_comes_from(tmp_path: Path) -> None:
    file, other = write(tmp_path, f"  {TOKEN}-file\n"), tmp_path / "other"
    other.write_text(f"{TOKEN}-other")
    other.chmod(0o640)
    assert load_token(file, {"AYNI_TOKEN": TOKEN, "AYNI_TOKEN_FILE": str(other)}) == f"{TOKEN}-file"
    assert load_token(None, {"AYNI_TOKEN": TOKEN, "AYNI_TOKEN_FILE": str(other)}) == f"{TOKEN}-other"
    assert load_token(None, {"AYNI_TOKEN": f" {TOKEN} "}) == TOKEN


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({}, "no join token: give --token-file, or set AYNI_TOKEN_FILE or AYNI_TOKEN"),
        ({"AYNI_TOKEN": ""}, "no join token"),
        ({"AYNI_TOKEN": "   "}, "the join token in AYNI_TOKEN has 0 characters; it needs 16 or more"),
        ({"AYNI_TOKEN": "short"}, "the join token in AYNI_TOKEN has 5 characters; it needs 16 or more"),
        ({"AYNI_TOKEN": "sixteen or more characters"}, "the join token in AYNI_TOKEN may have printable ASCII"),
        ({"AYNI_TOKEN": "sixteen-or-more-\u00e9\u00e9"}, "the join token in AYNI_TOKEN may have printable ASCII"),
        ({"AYNI_TOKEN_FILE": "/none"}, "can't read the join token in /none: No such file or directory"),
    ],
)
def test_what_is_no_token(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_token(None, environ)
    assert str(caught.value).startswith(problem)


def test_what_is_no_token_file(tmp_path: Path) -> None:
    file = write(tmp_path, TOKEN, 0o644)
    with pytest.raises(SettingsError, match=f"every user of this machine can read .* chmod 600 {file}"):
        load_token(file, {})
    with pytest.raises(SettingsError, match="has 0 characters"):
        load_token(write(tmp_path, "\n"), {})
    os.chmod(file, 0o600)
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(SettingsError, match="can't read the join token in"):
        load_token(file, {})


def test_a_token_is_a_secret_of_the_logs() -> None:
    token = load_token(None, {"AYNI_TOKEN": "a-token-that-is-logged"})
    record = logging.LogRecord("ayni", logging.INFO, "file", 1, "sent %s", (token,), None)
    assert logs._TextFormatter().format(record).endswith("sent [redacted]")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, []),
        (SettingsError("a is wrong", "b is wrong"), 2, ["a is wrong", "b is wrong"]),
        (TemporaryFailure("no coordinator"), 75, ["no coordinator"]),
        (RunEnded("the run is over"), 1, ["the run is over"]),
        (OSError("disk full"), 1, ["disk full"]),
        (KeyboardInterrupt(), 1, ["interrupted"]),
        (Stopped("SIGTERM"), 1, ["interrupted"]),
        (ZeroDivisionError(), 1, ["unexpected error"]),
    ],
)
def test_exit_codes(error: BaseException | None, code: int, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    def main() -> None:
        if error:
            raise error

    assert exit_code_of(main) == code
    assert [record.getMessage() for record in caplog.records] == said
    assert [bool(record.exc_info) for record in caplog.records] == [isinstance(error, ZeroDivisionError)] * len(said)


def test_the_code_that_the_work_returns_is_kept() -> None:
    assert [exit_code_of(lambda: 75), exit_code_of(lambda: 1), exit_code_of(lambda: 0)] == [75, 1, 0]
