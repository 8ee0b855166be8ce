"""Data by URL: files and a real S3 server; test_hub_files.py has the hub."""

import sys
from pathlib import Path

import obstore
import pytest

from ayni.errors import StorageFailed, TooLarge
from tests.support.seaweedfs import BUCKET, CREDENTIALS, SeaweedFS, s3
from worker_agent.integrations.urls import fetch

__all__ = ["s3"]  # A fixture, asked for by name.


def test_files_are_taken_as_they_are(tmp_path: Path):
    file = tmp_path / "a file.txt"
    file.write_text("lines")
    assert fetch(str(file)) == file
    assert fetch(file.as_uri()) == file
    with pytest.raises(FileNotFoundError, match="on this machine"):
        fetch("file:///no/such/file")


def test_objects_are_fetched_once_for_each_version(s3: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3.endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    obstore.put(s3.raw(), "data/train.txt", b"one" * 100_000)
    url = f"s3://{BUCKET}/data/train.txt"
    first = fetch(url, tmp_path)
    assert first.name == "train.txt"
    assert first.read_bytes() == b"one" * 100_000
    stamp = first.stat().st_mtime_ns
    assert fetch(url, tmp_path).stat().st_mtime_ns == stamp
    obstore.put(s3.raw(), "data/train.txt", b"two")
    assert fetch(url, tmp_path).read_bytes() == b"two"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["train.txt", "train.txt"]
    with pytest.raises(TooLarge, match="has 3 bytes; at most 2"):
        fetch(url, tmp_path, most_bytes=2)
    with pytest.raises(StorageFailed, match=r"s3://.*/absent can't be fetched"):
        fetch(f"s3://{BUCKET}/data/absent", tmp_path)


def test_files_of_the_hub_need_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'ayni\[train\]'"):
        fetch("hf://owner/model/config.json", tmp_path)


def test_what_names_nothing_is_refused():
    for url, sentence in {
        "ftp://host/file": "no URL of data",
        "s3://bucket": "names no object",
        "hf://owner/model": "names no file",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            fetch(url)
