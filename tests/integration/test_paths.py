"""Folders and names that a leader sends to a live agent can't lead out of the root that its operator gave."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ayni.v1 import worker_pb2 as pb
from tests.support.fuzz_agent import FuzzedAgent
from tests.support.fuzz_calls import Call, make
from tests.support.fuzz_servers import tree_listing

METHOD = "/ayni.v1.WorkerService/ConfigureLayouts"
OUT = [
    "../out",
    "/tmp/ayni-out",
    "a/../../out",
    "..",
    "a/..",
    "link",
    "link/x",
    "nul\0",
    "/",
    "a\\\0/../..",
    "line\nend",
]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedAgent]:
    folder = tmp_path_factory.mktemp("paths") / "agents"
    agent = FuzzedAgent(folder)
    (folder / "fuzzed" / "root" / "link").symlink_to(folder)
    yield agent
    agent.close()


def outside(agent: FuzzedAgent) -> dict[str, int]:
    """All files of the test that do not lie below the root, but for logs."""
    folder = agent.folder.parent
    found = tree_listing(folder)
    return {
        path: size for path, size in found.items() if not path.startswith("fuzzed/root") and not path.endswith("log")
    }


def refused(agent: FuzzedAgent, request: pb.ConfigureLayoutsRequest) -> str:
    before, inside = outside(agent), tree_listing(agent.folder / "root")
    call = Call(method=METHOD, requests=(request.SerializeToString(),))
    ended = make(agent.channel, agent.methods, call)
    assert outside(agent) == before
    assert tree_listing(agent.folder / "root") == inside
    assert not Path("/tmp/ayni-out").exists()
    return ended.reason or ended.code


@pytest.mark.parametrize("path", OUT)
def test_nothing_is_made_outside_the_root(agent: FuzzedAgent, path: str):
    for change in ("disk_folder", "bucket", "prefix"):
        agent.renew()
        request = agent.configuration()
        request.epoch += 1
        if change == "disk_folder":
            request.disk_folder = path
        elif change == "bucket":
            request.object_store.bucket = path
        else:
            request.object_store.bucket, request.object_store.prefix = ".", f"{path}/"
        assert refused(agent, request) == "BAD_REQUEST", change
    assert "Traceback" not in agent.log
