"""The run's files: fetched once, resumed, verified, shared by the processes of one machine."""

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from ayni.channels import open_channel
from ayni.errors import Checksum, Deadline, UnknownArtifact
from tests.support.coordinator import TOKEN, coordinator, environment
from worker_agent import backoff, bridge
from worker_agent.artifact_names import Artifact
from worker_agent.artifacts import ArtifactCache
from worker_agent.coordinator import Coordinator
from worker_agent.faults import TransportBroken

CHUNK = 1000
TEXT, MODEL = b"some text " * 517, os.urandom(12_345)
FILES = {"train.txt": TEXT, "model/weights.bin": MODEL, "model/copy.bin": MODEL, "empty": b""}


def listed(files: dict[str, bytes] = FILES) -> list[Artifact]:
    return [
        Artifact(name=name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        for name, data in files.items()
    ]


class Server:
    """Serves files in chunks, and breaks where it is told to."""

    def __init__(self, files: dict[str, bytes] = FILES) -> None:
        self.by_hash = {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        self.requests: list[tuple[str, int]] = []
        self.break_at: list[int] = []
        """Bytes after which a fetch breaks, for each of the first fetches."""
        self.closed = 0

    def __call__(self, artifact: Artifact, offset: int) -> Generator[tuple[int, bytes]]:
        self.requests.append((artifact.name, offset))
        data = self.by_hash[artifact.sha256]
        limit = self.break_at.pop(0) if self.break_at else len(data) + 1
        try:
            if offset == len(data):
                yield offset, b""
            for start in range(offset, len(data), CHUNK):
                if start >= limit:
                    raise TransportBroken("UNAVAILABLE, Socket closed")
                yield start, data[start : start + CHUNK]
        finally:
            self.closed += 1


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "_FIRST_SECONDS", 0.001)
    monkeypatch.setattr(backoff, "_LONGEST_SECONDS", 0.001)


def cached(folder: Path, data: bytes, suffix: str = "") -> Path:
    return folder / "files" / f"{hashlib.sha256(data).hexdigest()}{suffix}"


def test_files_come_under_their_names_and_equal_contents_once(tmp_path: Path):
    server, told = Server(), list[tuple[int, int]]()
    paths = ArtifactCache(tmp_path).provide(listed(), server, lambda done, total: told.append((done, total)))
    assert {name: path.read_bytes() for name, path in paths.items()} == FILES
    assert paths["model/weights.bin"].parts[-2:] == ("model", "weights.bin")
    assert paths["model/weights.bin"].parent == paths["model/copy.bin"].parent
    assert [name for name, _ in server.requests] == ["train.txt", "model/copy.bin", "empty"]
    total = len(TEXT) + len(MODEL)
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert told[0] == (CHUNK, total)
    assert server.closed == 3


def test_what_is_there_is_not_fetched_again_not_even_for_another_run(tmp_path: Path):
    first = ArtifactCache(tmp_path).provide(listed(), Server())
    server = Server()
    again = ArtifactCache(tmp_path).provide(listed(), server)
    renamed = ArtifactCache(tmp_path).provide(listed({"other.txt": TEXT}), server)
    assert server.requests == []
    assert again == first
    assert renamed["other.txt"].read_bytes() == TEXT
    assert renamed["other.txt"].parent != first["train.txt"].parent


def test_cached_files_are_read_only(tmp_path: Path):
    path = ArtifactCache(tmp_path).provide(listed(), Server())["train.txt"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_a_fetch_goes_on_where_the_last_process_stopped(tmp_path: Path):
    (tmp_path / "files").mkdir()
    cached(tmp_path, TEXT, ".part").write_bytes(TEXT[:2_345])
    server = Server()
    paths = ArtifactCache(tmp_path).provide(listed({"train.txt": TEXT}), server)
    assert server.requests == [("train.txt", 2_345)]
    assert paths["train.txt"].read_bytes() == TEXT
    assert not cached(tmp_path, TEXT, ".part").exists()


def test_a_broken_fetch_goes_on_where_it_broke(tmp_path: Path):
    server = Server()
    server.break_at = [2_000, 3_000]
    paths = ArtifactCache(tmp_path).provide(listed({"train.txt": TEXT}), server)
    assert server.requests == [("train.txt", 0), ("train.txt", 2_000), ("train.txt", 3_000)]
    assert paths["train.txt"].read_bytes() == TEXT


def test_a_fetch_that_never_gets_further_is_given_up_and_can_be_resumed(tmp_path: Path):
    server = Server()
    server.break_at = [2_000] * 20
    with pytest.raises(TransportBroken):
        ArtifactCache(tmp_path).provide(listed({"train.txt": TEXT}), server)
    assert len(server.requests) == 7
    assert cached(tmp_path, TEXT, ".part").read_bytes() == TEXT[:2_000]
    server.break_at = []
    ArtifactCache(tmp_path).provide(listed({"train.txt": TEXT}), server)
    assert server.requests[-1] == ("train.txt", 2_000)


@pytest.mark.parametrize("beginning", [b"x" * 2_000, TEXT + b"x"], ids=["foreign", "too long"])
def test_a_beginning_that_is_of_no_use_is_thrown_away(tmp_path: Path, beginning: bytes):
    (tmp_path / "files").mkdir()
    cached(tmp_path, TEXT, ".part").write_bytes(beginning)
    server = Server()
    paths = ArtifactCache(tmp_path).provide(listed({"train.txt": TEXT}), server)
    assert paths["train.txt"].read_bytes() == TEXT
    assert server.requests[-1] == ("train.txt", 0)


def test_a_complete_beginning_is_only_checked(tmp_path: Path):
    (tmp_path / "files").mkdir()
    cached(tmp_path, TEXT, ".part").write_bytes(TEXT)
    server = Server()
    assert ArtifactCache(tmp_path).provide(listed({"a": TEXT}), server)["a"].read_bytes() == TEXT
    assert server.requests == []


def test_content_that_is_not_what_was_announced_is_refused(tmp_path: Path):
    [artifact] = listed({"train.txt": TEXT})
    server = Server()
    server.by_hash[artifact.sha256] = TEXT[:-1] + b"X"
    with pytest.raises(Checksum, match=rf"train.txt .* has SHA-256 .*, but {artifact.sha256} was announced"):
        ArtifactCache(tmp_path).provide([artifact], server)
    assert not cached(tmp_path, TEXT).exists()
    assert not cached(tmp_path, TEXT, ".part").exists()


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([(CHUNK, TEXT[CHUNK:])], "bytes 1000 to 5170 came where byte 0 of 5170 was expected"),
        ([(0, TEXT + b"x")], "bytes 0 to 5171 came where byte 0 of 5170"),
        ([(0, TEXT[:10]), (0, TEXT[:10])], "bytes 0 to 10 came where byte 10 of 5170"),
    ],
)
def test_bytes_out_of_place_are_refused(tmp_path: Path, pieces: list[tuple[int, bytes]], words: str):
    def fetch(artifact: Artifact, offset: int) -> Generator[tuple[int, bytes]]:
        yield from pieces

    with pytest.raises(Checksum, match=words):
        ArtifactCache(tmp_path).provide(listed({"train.txt": TEXT}), fetch)


def test_a_damaged_file_in_the_cache_is_fetched_again(tmp_path: Path):
    path = ArtifactCache(tmp_path).provide(listed(), Server())["train.txt"]
    for damage in (TEXT[:-1] + b"X", TEXT[:-1]):
        held = cached(tmp_path, TEXT)
        held.chmod(0o644)
        held.write_bytes(damage)
        server = Server()
        assert ArtifactCache(tmp_path).provide(listed(), server)["train.txt"].read_bytes() == TEXT
        assert server.requests == [("train.txt", 0)]
        assert path.read_bytes() == TEXT


def test_a_name_that_leads_out_of_the_folder_is_refused_before_anything_is_fetched(tmp_path: Path):
    server = Server()
    with pytest.raises(ValueError, match="refused"):
        ArtifactCache(tmp_path / "cache").provide(listed({"../out.txt": TEXT}), server)
    assert server.requests == []
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    free = 70 << 20
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 0, free))
    big = Artifact(name="big", sha256="0f" * 32, size_bytes=10 << 20)
    server = Server()
    with pytest.raises(OSError, match=r"need 10.5 MB more .* where 73.4 MB are free: make room, or .*--cache-dir"):
        ArtifactCache(tmp_path).provide([big], server)
    assert server.requests == []
    free = 80 << 20
    with pytest.raises(KeyError):
        ArtifactCache(tmp_path).provide([big], server)


def test_a_disk_that_fills_up_ends_the_fetch_with_the_files_name(tmp_path: Path):
    (tmp_path / "files").mkdir()
    cached(tmp_path, TEXT, ".part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"can't write train.txt to .*\.part: No space left on device") as caught:
        ArtifactCache(tmp_path).provide(listed({"train.txt": TEXT}), Server())
    assert caught.value.errno == errno.ENOSPC


def test_a_lock_that_is_held_for_too_long_says_by_what(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    import fcntl

    caplog.set_level("INFO")
    (tmp_path / "files").mkdir()
    with cached(tmp_path, TEXT, ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = r"waited 0.2 s in vain for another process on this machine that fetches train.txt \(it holds .*\.lock\)"
        with pytest.raises(Deadline, match=words):
            ArtifactCache(tmp_path, timedelta(seconds=0.2)).provide(listed({"train.txt": TEXT}), Server())
    assert "another process on this machine fetches train.txt; waiting for it" in caplog.messages


def test_workers_that_start_together_fetch_each_file_once(tmp_path: Path):
    server = Server()
    with ThreadPoolExecutor(6) as pool:
        views = list(pool.map(lambda _: ArtifactCache(tmp_path).provide(listed(), server), range(6)))
    assert all(view == views[0] for view in views)
    assert {name: path.read_bytes() for name, path in views[0].items()} == FILES
    assert sorted(name for name, _ in server.requests) == ["empty", "model/copy.bin", "train.txt"]


FETCHER = """
import json, sys
from pathlib import Path
from ayni.channels import open_channel
from worker_agent import bridge
from worker_agent.artifacts import ArtifactCache
from worker_agent.coordinator import Coordinator
from datetime import timedelta
address, token, folder = sys.argv[1:]
network = bridge.shared()
async def connect():
    return Coordinator(open_channel(address, token), address)
coordinator = network.wait(connect(), 20, "a channel")
run = network.wait(coordinator.get_run("", timedelta(seconds=20)), 30, "GetRun")
fetch = lambda artifact, offset: network.iterate(coordinator.fetch(artifact.sha256, offset), 20, artifact.name)
paths = ArtifactCache(Path(folder)).provide(run.artifacts, fetch)
print(json.dumps({name: str(path) for name, path in paths.items()}))
"""


def test_processes_share_what_a_real_coordinator_serves(tmp_path: Path):
    files = {**FILES, "big.bin": os.urandom(3_500_000)}
    for name, data in files.items():
        (tmp_path / "artifacts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "artifacts" / name).write_bytes(data)
    cache = tmp_path / "cache"
    with coordinator(tmp_path, {"run_id": "files", "artifacts": "artifacts"}) as server:
        command = [sys.executable, "-c", FETCHER, server.address, TOKEN, str(cache)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) for _ in range(2)]
        answers = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    paths = json.loads(answers[0])
    assert json.loads(answers[1]) == paths
    assert {name: Path(path).read_bytes() for name, path in paths.items()} == files


def test_a_file_that_the_run_does_not_have_is_refused(tmp_path: Path):
    network = bridge.shared()

    async def connect(address: str) -> Coordinator:
        return Coordinator(open_channel(address, TOKEN), address)

    with coordinator(tmp_path, {"run_id": "files"}) as server:
        remote = network.wait(connect(server.address), 20, "a channel")
        pieces = network.iterate(remote.fetch("0f" * 32, 0), 20, "bytes")
        with pytest.raises(UnknownArtifact, match="no file with SHA-256"):
            next(pieces)
        network.wait(remote.close(), 20, "the end of a channel")
