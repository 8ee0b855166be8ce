"""What the comparison of example workers takes for equal, and what it says is missing."""

import shutil
from typing import Any

import pytest

from scripts import interop, interop_builds
from scripts.interop_builds import EXAMPLES, LANGUAGES, InteropError
from tests.unit.test_layers import ROOT

PYTHON = {"language": "python", "worker": "p", "steps": 30, "parameters_sha256": "ab", "first_loss": 441.0, "loss": 2.5}
GO = {**PYTHON, "language": "go", "worker": "g"}


def test_equal_workers_are_summed_up():
    assert interop.compare({"p": PYTHON, "g": GO}, {"p": PYTHON}) == {
        **{"languages": ["python", "go"], "steps": 30, "parameters_sha256": "ab", "first_loss": 441.0, "loss": 2.5}
    }


@pytest.mark.parametrize(
    "other", [{"parameters_sha256": "cd"}, {"steps": 29}, {"loss": 2.4}, {"first_loss": 440.0}], ids=str
)
def test_a_worker_that_differs_is_named(other: dict[str, Any]):
    with pytest.raises(InteropError, match=rf"{next(iter(other))} differs: .* but .*'g'"):
        interop.compare({"p": PYTHON, "g": {**GO, **other}}, {"p": PYTHON})


def test_workers_that_agree_on_another_result_than_one_alone_are_wrong():
    with pytest.raises(InteropError, match="parameters_sha256 differs"):
        interop.compare({"p": PYTHON, "g": GO}, {"p": {**PYTHON, "parameters_sha256": "cd"}})


def test_the_loss_must_fall():
    lazy = {**PYTHON, "loss": 400.0}
    with pytest.raises(InteropError, match=r"fell from 441\.0 to 400\.0 only"):
        interop.compare({"p": lazy}, {"p": lazy})


def test_all_that_is_missing_is_named_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "go" else f"/bin/{program}")
    monkeypatch.setattr(interop_builds, "_is_installed", lambda package: not package.startswith("golang-google"))
    monkeypatch.setattr(interop_builds, "_build", pytest.fail)
    with pytest.raises(InteropError) as caught:
        interop_builds.build_all(["python", "cpp", "go"])
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    packages = "golang-google-grpc-dev golang-google-protobuf-dev"
    assert lines == [f"go: apt-get install {packages}", "go: the program go is not on PATH"]


def test_a_program_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert interop_builds.missing("rust") == ["the program cargo is not on PATH", "the program protoc is not on PATH"]


def test_an_unknown_language_is_refused(capsys):
    with pytest.raises(SystemExit):
        interop.main(["--languages", "cobol"])
    assert "cobol: choose from python" in capsys.readouterr().err


def test_every_example_is_run_or_said_not_to_be():
    folders = {path.parent.name for path in EXAMPLES.glob("*/build.sh")}
    assert set(LANGUAGES) == folders
    page = (EXAMPLES / "README.md").read_text()
    assert [name for name in LANGUAGES if f"| [{name}](" not in page] == []


def test_a_run_file_of_the_examples_asks_for_what_their_page_says():
    page, run = (EXAMPLES / "README.md").read_text(), (ROOT / "examples" / "clients" / "run.yaml").read_text()
    assert "two chunks" in page
    assert "chunk_bytes: 65536" in run
