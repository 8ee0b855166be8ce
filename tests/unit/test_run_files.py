"""The run's files: lookups, folders, and messages that help."""

from pathlib import Path

import pytest

from worker_agent.training.files import RunFiles


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """Files as a cache keeps them: by content, under other names."""
    named = {}
    for index, (name, content) in enumerate(
        [
            ("model/config.json", b"{}"),
            ("model/sub/weights.bin", b"w"),
            ("train.txt", "\u00e9\r\n".encode()),
            ("raw", b"\xff"),
        ]
    ):
        path = tmp_path / f"{index:064x}"
        path.write_bytes(content)
        named[name] = path
    return RunFiles(named)


def test_a_folder_has_its_files_under_their_own_names(files: RunFiles) -> None:
    folder = files.folder("model")
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "sub" / "weights.bin").read_bytes() == b"w"
    assert not (folder / "train.txt").exists()
    assert files.folder("model/") == folder


def test_a_folder_is_gone_when_its_owner_is(files: RunFiles) -> None:
    other = RunFiles({name: files.path(name) for name in files.names})
    folder = other.folder("model")
    assert folder.is_dir()
    del other
    assert not folder.exists()
    assert files.path("model/config.json").is_file()


def test_text_keeps_line_ends(files: RunFiles) -> None:
    assert files.text("train.txt") == "\u00e9\r\n"


def test_a_missing_file_is_refused_with_the_nearest_name(files: RunFiles) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"the run has no file 'trian.txt'; did you mean 'train.txt'\? It has: "
    ):
        files.path("trian.txt")
    with pytest.raises(FileNotFoundError, match=r"the run has no folder 'modle'; did you mean 'model'\?"):
        files.folder("modle")
    with pytest.raises(FileNotFoundError, match=r"it has no files at all: set `artifacts` in the run file"):
        RunFiles({}).path("train.txt")


def test_a_file_that_is_gone_from_the_cache_is_named_with_its_place(files: RunFiles) -> None:
    files.path("train.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"'train.txt' of the run is missing on this worker at /"):
        files.path("train.txt")


def test_text_that_is_not_utf8_is_refused(files: RunFiles) -> None:
    with pytest.raises(ValueError, match=r"file 'raw' of the run is not UTF-8 text"):
        files.text("raw")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", ""])
def test_names_that_could_leave_a_folder_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be a relative path"):
        RunFiles({name: Path("x")})
