"""A contribution that is made again: the sum was lost, or the stream broke."""

from typing import Any

import grpc
import numpy as np
import pytest

from ayni.errors import Duplicate, RoundRestarted, StepVoided
from ayni.frames import ChunkView, decode_frame, encode_chunk
from ayni.v1 import coordinator_pb2 as pb
from tests.support.echo_coordinator import ACCEPTED, EchoCoordinator, accept_and_lose, lease
from tests.support.elastic_client import ONES, begin, contribute, eventually, in_background, membership, report
from worker_agent.faults import TransportBroken
from worker_agent.session import Commit


class RestartingCoordinator(EchoCoordinator):
    """Loses the sums of the first tries, when half of the mean has left."""

    def __init__(self, restarts: int) -> None:
        super().__init__()
        self._restarts = restarts
        self.gradient = self.restart

    async def restart(self, context: Any) -> None:
        if self.calls["Gradient"] > self._restarts:
            await self.echo(context)
            return
        begun = await self.begun(context)
        await context.write(ACCEPTED)
        left = begun.tensor.num_elements * 4
        while left:
            _, chunk = decode_frame(await context.read())
            assert isinstance(chunk, ChunkView)
            left -= len(chunk.data)
            if chunk.offset_bytes == 0:
                await context.write(encode_chunk(2, 0, 0, bytes(len(chunk.data))))
        raise RoundRestarted("flat of step 0 starts again: worker bee died", bucket="flat")


def test_a_sum_that_was_lost_is_contributed_to_again_without_the_caller_noticing():
    server = RestartingCoordinator(restarts=3)
    values = np.arange(50_000, dtype=np.float32)
    with membership(server) as client:
        shard = begin(server, client)
        out = np.empty_like(values)
        future = contribute(client, shard, values, out)
        commit = client.commit(shard, report(shard))
        assert isinstance(commit, Commit)
        assert future.result(0) is out
        assert out.tobytes() == (values / np.float32(4)).tobytes()
    assert server.calls["Gradient"] == 4
    assert all(begun == server.begins[0] for begun in server.begins)
    assert server.calls["CommitStep"] == 1


def test_restarts_end_with_the_attempt():
    server = RestartingCoordinator(restarts=1_000_000)
    with membership(server) as client:
        future = contribute(client, begin(server, client))
        eventually(lambda: server.calls["Gradient"] > 3, "a few restarts")
        server.say(lease(attempt=1))
        assert client.receive_shard()
        with pytest.raises(StepVoided):
            future.result(0)


def test_a_stream_that_breaks_is_contributed_to_again_by_an_elastic_worker():
    server = EchoCoordinator()

    async def lose_two(context: Any) -> None:
        await (accept_and_lose if server.calls["Gradient"] < 3 else server.echo)(context)

    server.gradient = lose_two
    with membership(server) as client:
        assert contribute(client, begin(server, client)).result(20)[0] == 0.25
    assert server.calls["Gradient"] == 3
    assert server.calls["Join"] == 1


def test_a_stream_that_breaks_is_not_contributed_to_again_by_another_worker():
    server = EchoCoordinator(lease_seconds=0.3)
    server.gradient = accept_and_lose
    with membership(server, elastic=False) as client:
        with pytest.raises(TransportBroken):
            contribute(client, begin(server, client)).result(20)
    assert server.calls["Gradient"] == 1


def test_a_coordinator_that_has_not_noticed_the_broken_stream_is_asked_until_it_has():
    async def refuse(context: Any) -> None:
        if server.calls["Gradient"] == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if server.calls["Gradient"] < 4:
            raise Duplicate("worker ant contributes to flat already", bucket="flat")

    server = EchoCoordinator()
    server.on["Gradient"] = refuse
    with membership(server) as client:
        assert contribute(client, begin(server, client)).result(20)[0] == 0.25
    assert server.calls["Gradient"] == 4


def test_a_contribution_that_is_made_twice_by_mistake_is_refused():
    async def refuse(_: Any) -> None:
        raise Duplicate("worker ant has contributed to flat already", bucket="flat")

    server = EchoCoordinator()
    server.on["Gradient"] = refuse
    with membership(server) as client, pytest.raises(Duplicate):
        contribute(client, begin(server, client)).result(20)
    assert server.calls["Gradient"] == 1


def test_nothing_is_sent_of_what_the_coordinator_holds_already():
    frames: list[bytes] = []

    async def hold(context: Any) -> None:
        begun = await server.begun(context)
        held = pb.RoundAccepted(chunk_bytes=1 << 16, already_held=True)
        await context.write(pb.GradientResponse(accepted=held).SerializeToString())
        while (frame := await context.read()) is not grpc.aio.EOF:
            frames.append(frame)
        mean = np.full(begun.tensor.num_elements, 3, np.float32)
        await context.write(encode_chunk(2, 0, 0, mean.tobytes()))
        await context.write(
            pb.GradientResponse(complete=pb.RoundComplete(total_weight=4, num_contributors=2)).SerializeToString()
        )

    server = EchoCoordinator()
    server.gradient = hold
    with membership(server) as client:
        sent = client.traffic.sent_bytes
        assert np.all(contribute(client, begin(server, client)).result(20) == 3)
        assert client.traffic.sent_bytes - sent < 200
    assert frames == []


def test_a_commit_waits_for_the_contribution_that_is_made_again():
    server = RestartingCoordinator(restarts=2)
    with membership(server) as client:
        shard = begin(server, client)
        contribute(client, shard, ONES)
        waiting = in_background(lambda: client.commit(shard, report(shard)))
        assert isinstance(waiting.result(20), Commit)
        assert server.calls["Gradient"] == 3
