"""The conformance suite on real workers: near, called over gRPC, and as a group; between groups over each engine."""

from functools import partial

import pytest

from tests.support import nixl_peer
from tests.support.block_conformance import EndConformance, LocalConformance
from tests.support.block_conformance_remote import ObjectConformance, RemoteConformance
from tests.support.block_groups import OpenGroup
from tests.support.worker_groups import worker_group

CASES = [
    *("one near grpc", "one far grpc", "two near shm grpc", "two far grpc", "one far shm grpc"),
    pytest.param("one near nixl grpc", marks=nixl_peer.NEEDED),
]


@pytest.fixture(params=CASES)
def block_group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OpenGroup:
    for name, value in nixl_peer.LOOPBACK.items():
        monkeypatch.setenv(name, value)
    number, where, *engines = request.param.split()
    return partial(worker_group, 1 if number == "one" else 2, where, *engines)


class TestLocal(LocalConformance):
    pass


class TestEnds(EndConformance):
    pass


class TestRemote(RemoteConformance):
    pass


class TestObjects(ObjectConformance):
    pass
