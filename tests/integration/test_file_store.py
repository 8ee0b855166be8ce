"""The store of files: what every store does, and what only files can get wrong."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ayni.blocks.objects import ObjectStoreConfig
from ayni.errors import AyniError, BadRequest, StorageFailed, Unsupported
from tests.support.coordinator import ROOT, environment
from tests.support.store_conformance import LockConformance, StoreConformance, Stores, read, view
from worker_agent.blocks.objects.file_store import FileStore
from worker_agent.blocks.objects.opening import open_store


@pytest.fixture(params=[False, True], ids=["cached", "synced"])
def stores(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stores]:
    pair = FileStore(tmp_path / "store", sync=request.param), FileStore(tmp_path / "store")
    yield pair
    for store in pair:
        store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    opened = FileStore(tmp_path / "store")
    yield opened
    opened.close()


class TestFileStore(StoreConformance):
    pass


class TestFileLocks(LockConformance):
    pass


def objects(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and ".ayni" not in path.parts]


def unfinished(root: Path) -> list[Path]:
    return [path for path in (root / ".ayni" / "staging").rglob("*") if path.is_file() and path.name != "lock"]


def staging_folders(root: Path) -> set[str]:
    return {path.name for path in (root / ".ayni" / "staging").iterdir()}


def run(code: str, root: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )


@pytest.mark.parametrize(
    "name", ["", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a/.", "..", "a\0b", ".ayni/locks/00"]
)
def test_names_can_not_leave_the_root(store: FileStore, name: str) -> None:
    for call in (store.has, store.delete, lambda n: store.put_if_absent(n, view(b"x")), lambda n: read(store, n)):
        with pytest.raises(BadRequest, match="can't be the name of an object"):
            call(name)
    assert objects(store.root) == []


def test_objects_are_spread_over_folders_and_are_their_owners(store: FileStore) -> None:
    for number in range(100):
        store.put_if_absent(f"a/b/{number}", view(b"x"))
    found = objects(store.root)
    assert len(found) == 100
    assert {path.parent.parent for path in found} == {store.root / "a" / "b"}
    assert len({path.parent for path in found}) > 50
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}


def test_nothing_unfinished_is_left(store: FileStore) -> None:
    for _ in range(2):
        store.put_if_absent("a", view(b"x"))
    store.put_if_match("a", view(b"y"), "another version")
    assert unfinished(store.root) == []


KILLED_IN_THE_MIDDLE = """
import os, sys
from pathlib import Path
from worker_agent.blocks.objects.file_store import FileStore

store = FileStore(Path(sys.argv[1]))
link = os.link

def stop(*arguments):
    print("linking", flush=True)
    sys.stdin.read()
    link(*arguments)

os.link = stop
store.put_if_absent("a", memoryview(b"x" * 100000))
"""


def test_what_a_killed_process_left_is_swept_and_a_live_one_s_is_not(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with run(KILLED_IN_THE_MIDDLE, root) as process:
        assert process.stdout
        assert process.stdout.readline() == "linking\n"
        store = FileStore(root)
        assert len(unfinished(root)) == 1, "its owner still lives"
        assert store.has("a") is None, "nothing shows before it is whole"
        store.close()
        process.send_signal(signal.SIGKILL)
    again = FileStore(root)
    assert unfinished(root) == []
    assert len(staging_folders(root)) == 1
    assert again.has("a") is None
    again.close()
    assert staging_folders(root) == set()


def test_folder_that_its_owner_is_just_removing_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = FileStore(tmp_path / "store")
    listed = Path.iterdir

    def then_gone(folder: Path) -> Iterator[Path]:
        found = list(listed(folder))
        if folder.name == "staging":
            closing.close()
        return iter(found)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", then_gone)
        store = FileStore(tmp_path / "store")
    assert store.put_if_absent("a", view(b"x"))
    store.close()


def test_stray_file_among_unfinished_ones_is_passed_over(tmp_path: Path) -> None:
    FileStore(tmp_path / "store").close()
    stray = tmp_path / "store" / ".ayni" / "staging" / "stray"
    stray.write_text("x")
    store = FileStore(tmp_path / "store")
    assert store.put_if_absent("a", view(b"x"))
    store.close()
    assert stray.exists()


RACER = """
import sys
from pathlib import Path
from worker_agent.blocks.objects.file_store import FileStore

store = FileStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
wins = sum(store.put_if_absent(f"a/{i}", memoryview(b"x" * 10000)) for i in range(200))
for i in range(50):
    while True:
        found = store.get("counter", memoryview(bytearray(20)))
        if store.put_if_match("counter", memoryview(b"%d" % (int(found.data) + 1)), found.version):
            break
print(wins, flush=True)
store.close()
"""


def test_processes_that_share_a_folder_never_both_win(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = FileStore(root)
    store.put_if_absent("counter", view(b"0"))
    racers = [run(RACER, root) for _ in range(3)]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    answers = [racer.communicate("go\n", timeout=60)[0] for racer in racers]
    assert sum(map(int, answers)) == 200
    assert read(store, "counter") == b"150"
    store.close()


def test_wait_for_a_lock_ends(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", timeout_s=0.05)
    store.put_if_absent("a", view(b"x"))
    store.delete("a")
    lock = os.open(next((store.root / ".ayni" / "locks").iterdir()), os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(StorageFailed, match=r"could not delete a in .*another process holds .* for more than 0.05 s"):
        store.delete("a")
    os.close(lock)
    store.delete("a")
    store.close()


def test_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StorageFailed, match="could not open the store") as failed:
        FileStore(tmp_path / "store")
    assert failed.value.metadata["place"] == str(tmp_path / "store")


def config(**values: object) -> ObjectStoreConfig:
    return ObjectStoreConfig(**({"kind": "file", "bucket": "objects"} | values))  # type: ignore[arg-type]


def test_opening_by_configuration(tmp_path: Path) -> None:
    store = open_store(config(prefix="kv/"), tmp_path)
    assert store.put_if_absent("kv/a", view(b"x"))
    assert [path.relative_to(tmp_path).parts[:2] for path in objects(tmp_path)] == [("objects", "kv")]
    store.close()


@pytest.mark.parametrize(
    ("bucket", "prefix"),
    [("objects", "link/"), ("objects", "link/deeper/"), ("objects", "link/start of names"), ("objects/link", "")],
)
def test_links_out_of_the_root_are_refused(tmp_path: Path, bucket: str, prefix: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (root / "objects").mkdir(parents=True)
    (root / "objects" / "link").symlink_to(outside)
    with pytest.raises(BadRequest, match="a link on the way leads to"):
        open_store(config(bucket=bucket, prefix=prefix), root)
    assert list(outside.iterdir()) == []


def test_links_inside_the_root_are_followed(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "objects" / "link").symlink_to(tmp_path / "elsewhere")
    store = open_store(config(prefix="link/"), tmp_path)
    assert store.put_if_absent("link/a", view(b"x"))
    store.close()
    assert len(objects(tmp_path / "elsewhere")) == 1


@pytest.mark.parametrize(
    ("wrong", "error", "why"),
    [
        ({"kind": "ftp"}, BadRequest, "the kind 'ftp' is none of file, s3, gcs, azure"),
        ({"bucket": ""}, BadRequest, "the bucket has no name"),
        ({"bucket": "../elsewhere"}, BadRequest, "outside the root"),
        ({"bucket": "/etc"}, BadRequest, "outside the root"),
        ({"prefix": "../"}, BadRequest, "prefix"),
        ({"prefix": ".ayni/"}, BadRequest, "can't be the name of an object"),
        ({"max_requests": 0}, BadRequest, "max_requests"),
        ({"request_timeout_s": 0.0}, BadRequest, "request_timeout_s"),
        ({"request_timeout_s": float("nan")}, BadRequest, "request_timeout_s"),
        ({"endpoint": "http://127.0.0.1:1"}, Unsupported, "has no endpoint"),
        ({"region": "us-east-1"}, Unsupported, "has no region"),
        ({"path_style": True}, Unsupported, "has no path_style"),
        ({"kind": "s3", "endpoint": "127.0.0.1:1"}, BadRequest, "no URL"),
    ],
)
def test_configurations_that_are_refused(
    tmp_path: Path, wrong: dict[str, object], error: type[AyniError], why: str
) -> None:
    with pytest.raises(error, match=why):
        open_store(config(**wrong), tmp_path)


def test_service_without_its_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "worker_agent.blocks.objects.obstore_store", raising=False)
    with pytest.raises(Unsupported, match=r"install the extra ayni\[s3\]"):
        open_store(config(kind="s3"), tmp_path)
