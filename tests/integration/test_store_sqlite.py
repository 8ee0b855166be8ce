"""What is particular to the embedded store: its file, its folder, its disk."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator_service.store import open_folder
from tests.support import store_writer
from tests.support.commits import commit
from tests.support.coordinator import environment


def test_a_folder_may_be_moved_and_copied(tmp_path):
    with contextlib.closing(open_folder(tmp_path / "run")) as store:
        store.commit(commit(0))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run").rename(tmp_path / "moved")
    for name in ("moved", "copy"):
        with contextlib.closing(open_folder(tmp_path / name)) as store:
            assert store.commits() == [commit(0)]


def test_a_database_of_an_older_layout_is_refused_and_kept(tmp_path):
    path = tmp_path / "run.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE commits (kind TEXT, step INTEGER)")
    for to_read in (False, True):
        with pytest.raises(OSError, match=r"layout 1, this one knows 2.*give another run_id, or --fresh"):
            open_folder(tmp_path, to_read=to_read)
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT COUNT(*) FROM commits").fetchone() == (0,)
    with contextlib.closing(open_folder(tmp_path, fresh=True)) as store:
        assert store.commits() == []


def test_a_database_of_a_newer_layout_is_refused(tmp_path):
    open_folder(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "run.sqlite3")) as database:
        database.execute("UPDATE layout SET version = 3")
        database.commit()
    with pytest.raises(OSError, match="layout 3, this one knows 2"):
        open_folder(tmp_path)


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "run.sqlite3").write_bytes(os.urandom(8192))
    with pytest.raises(
        OSError, match=r"run\.sqlite3 can't be opened: file is not a database; restore it from a backup"
    ):
        open_folder(tmp_path)


def test_a_refused_opening_lets_go_of_the_lock(tmp_path):
    (tmp_path / "run.sqlite3").write_bytes(os.urandom(8192))
    for _ in range(2):
        with pytest.raises(OSError, match="not a database"):
            open_folder(tmp_path)


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_folder(tmp_path / "file" / "run")


def test_a_full_disk_refuses_a_commit_and_keeps_the_others(tmp_path):
    done = subprocess.run(
        [sys.executable, str(Path(store_writer.__file__)), str(tmp_path), "toy", "200000"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )
    *said, refusal = done.stdout.splitlines()[1:]
    assert refusal.startswith("refused the run's state in"), done.stderr
    assert f"{tmp_path / 'toy' / 'run.sqlite3'} can't be written" in refusal
    assert len(said) >= 5
    with contextlib.closing(open_folder(tmp_path / "toy")) as store:
        assert len(said) <= store.committed_steps() <= len(said) + 1
        assert store.commits() == [commit(step) for step in range(store.committed_steps())]
