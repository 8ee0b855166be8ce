"""Files of a Hugging Face hub through its own client, from a server on loopback that speaks what that asks for."""

import json
from pathlib import Path

from tests.support.hub_server import Hub, hub
from tests.support.tracked_runs import python

PROGRAM = """
import json, sys
from pathlib import Path
from worker_agent.integrations.urls import fetch
found = []
for url, most in json.loads(sys.argv[2]):
    try:
        path = fetch(url, Path(sys.argv[1]), most)
        found.append([path.name, path.read_text()])
    except Exception as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps(found))
"""
"""The client reads its endpoint when it is imported, so it gets a process of its own."""


def fetched(server: Hub, folder: Path, *urls: str, most: int = 1 << 20) -> list[list[str]]:
    asked = json.dumps([(url, most) for url in urls])
    said = python(PROGRAM, folder, str(folder / "cache"), asked, HF_ENDPOINT=server.endpoint, HF_HUB_OFFLINE="0")
    found: list[list[str]] = json.loads(said.splitlines()[-1])
    return found


def test_files_come_once_for_each_version(tmp_path: Path) -> None:
    data, model = "hf://datasets/owner/name@refs%2Fpr%2F1/part/train.txt", "hf://owner/model/config.json"
    with hub() as server:
        server.files["datasets/owner/name", "refs/pr/1", "part/train.txt"] = b"one"
        server.files["owner/model", "main", "config.json"] = b"{}"
        assert fetched(server, tmp_path, data, data, model) == [["train.txt", "one"]] * 2 + [["config.json", "{}"]]
        loaded = [asked for asked in server.asked if asked.startswith("GET") and "/resolve/" in asked]
        assert loaded == [
            "GET /datasets/owner/name/resolve/refs%2Fpr%2F1/part/train.txt",
            "GET /owner/model/resolve/main/config.json",
        ]
        server.files["owner/model", "main", "config.json"] = b"{ }"
        assert fetched(server, tmp_path, model) == [["config.json", "{ }"]]


def test_what_can_not_be_fetched_is_said_and_leaves_nothing_behind(tmp_path: Path) -> None:
    names = ("absent.txt", "long.txt", "cut.txt")
    with hub() as server:
        for name in names[1:]:
            server.files["owner/model", "main", name] = b"long" * 10
        urls = [f"hf://owner/model/{name}" for name in names]
        [absent] = fetched(server, tmp_path, urls[0])
        [too_long] = fetched(server, tmp_path, urls[1], most=39)
        server.cut.add("cut.txt")
        [cut, misnamed] = fetched(server, tmp_path, urls[2], "hf://owner/-model/file")
    assert (absent[0], too_long[0], cut[0], misnamed[0]) == ("StorageFailed", "TooLarge", "StorageFailed", "ValueError")
    assert "hf://owner/model/absent.txt can't be fetched: 404" in absent[1]
    assert too_long[1] == "hf://owner/model/long.txt has 40 bytes; at most 39 are fetched"
    assert "hf://owner/model/cut.txt can't be fetched" in cut[1]
    assert "hf://owner/-model/file names no file" in misnamed[1]
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.name in names]
