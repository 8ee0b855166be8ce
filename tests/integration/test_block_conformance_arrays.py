"""The conformance suite on array workers: near, behind gRPC, and attached to who calls them."""

import asyncio
from functools import partial

import pytest

from tests.support.array_groups import array_group
from tests.support.block_conformance import EndConformance, LocalConformance
from tests.support.block_conformance_remote import ObjectConformance, RemoteConformance
from tests.support.block_groups import OpenGroup, soon


@pytest.fixture(params=["near", "far", "attached"])
def block_group(request: pytest.FixtureRequest) -> OpenGroup:
    return partial(array_group, 1, request.param)


class TestLocal(LocalConformance):
    pass


class TestEnds(EndConformance):
    pass


class TestRemote(RemoteConformance):
    pass


class TestObjects(ObjectConformance):
    pass


@pytest.mark.fact("T101")
def test_a_hang_fails_where_it_hangs() -> None:
    async def hang() -> None:
        with pytest.raises(AssertionError, match="a hang has not ended"):
            await soon(asyncio.Event().wait(), "a hang", 0.01)

    asyncio.run(hang())
