"""How moves through gRPC end, and how links begin: cancelled, late, cut off, refused; TLS; warm-up."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
import numpy as np
import pytest

from ayni.blocks.ids import Ids
from ayni.endpoints import ClientTls, Keepalive, ServerTls
from ayni.errors import AyniError, PeerLost, Unsupported
from ayni.rpc import client_options
from scripts import make_certs
from tests.support import block_peer
from tests.support.block_peer import TOKEN, Lender, Servicer, blocks_of, descriptor, filled, metadata
from tests.support.grpc_pairs import LIMIT, Apart, Pair, connected, ended, geometry, run
from worker_agent.blocks import frames, streams
from worker_agent.blocks.engine import Move
from worker_agent.blocks.engines.grpc_calls import MOST_PER_CALL, Share, read_request
from worker_agent.blocks.engines.grpc_engine import Dialling, GrpcEngine
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks.memory import Memory, Part


def test_cancelled_pull_ends_at_once_and_leaves_the_blocks_alone_from_then_on():
    async def test() -> None:
        size: dict[str, Any] = {"num_blocks": 512, "region_bytes": 1 << 14}
        remote, local = filled(geometry(**size), seed=1), filled(geometry(**size), seed=2)
        async with connected(remote) as pair:
            ticket = pair.link.pull(pair.move(local, range(512), range(512)))
            before = blocks_of(local, [0])
            while np.array_equal(blocks_of(local, [0]), before):
                assert not ticket.outcome.done(), "the move was over before it could be disturbed"
                await asyncio.sleep(0)
            ticket.cancel()
            result = await ended(ticket)
            failed = [index for index, _ in result.failures]
            assert failed == list(range(512)), "the peer had not said yet that they are good"
            assert {failure.reason for _, failure in result.failures} == {"CANCELLED"}
            after = blocks_of(local)
            await asyncio.sleep(0.05)
            assert np.array_equal(blocks_of(local), after), "bytes landed after the move was quiesced"
            ticket.cancel()

    run(test)


def test_cancelled_push_is_quiesced_when_the_peer_has_let_go():
    async def test() -> None:
        size: dict[str, Any] = {"num_blocks": 512, "region_bytes": 1 << 14}
        remote, local = filled(geometry(**size), seed=1), filled(geometry(**size), seed=2)
        async with connected(remote) as pair:
            before = blocks_of(remote, [0])
            ticket = pair.link.push(pair.move(local, range(512), range(512)))
            while np.array_equal(blocks_of(remote, [0]), before):
                assert not ticket.outcome.done(), "the move was over before it could be disturbed"
                await asyncio.sleep(0)
            ticket.cancel()
            result = await ended(ticket)
            assert [index for index, _ in result.failures] == list(range(512)), "no answer: nothing counts as written"
            assert pair.lender.busy == set()
            assert not (await pair.push(local, [0, 511], [0, 511])).failures

    run(test)


class Stuck(Servicer):
    """Answers nothing but the warm-up."""

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncGenerator[bytes, None]:  # noqa: N802
        async with aclosing(Servicer.ReadBlocks(self, request, context)) as answers:
            async for frame in answers:
                yield frame
                if request.blocks.starts[0]:
                    await asyncio.Event().wait()

    async def WriteBlocks(self, requests: Any, context: Any) -> Any:  # noqa: N802
        await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["pull", "push"])
def test_outcome_is_there_at_the_deadline(way):
    async def test() -> None:
        local = filled(geometry(), seed=2)
        async with connected(filled(geometry(), seed=1), Stuck) as pair:
            move = pair.move(local, [1, 2], [1, 2], limit=0.2)
            ticket = pair.link.pull(move) if way == "pull" else pair.link.push(move)
            async with asyncio.timeout_at(move.deadline + 0.1):
                result = await ticket.outcome
            assert asyncio.get_running_loop().time() >= move.deadline
            assert [(index, failure.reason) for index, failure in result.failures] == [(0, "DEADLINE"), (1, "DEADLINE")]
            await ended(ticket)

    run(test)


def test_closing_a_link_fails_what_is_in_flight():
    async def test() -> None:
        async with connected(filled(geometry(), seed=1), Stuck) as pair:
            ticket = pair.link.pull(pair.move(filled(geometry(), seed=2), [1], [1]))
            await asyncio.sleep(0)
            await pair.link.close()
            assert ticket.quiesced.done()
            assert (await ticket.outcome).failures[0][1].reason == "PEER_LOST"

    run(test)


class SlowDisk(Apart):
    """Memory whose writes take a while, in a thread."""

    def __init__(self, host: Memory) -> None:
        super().__init__(host)
        self.writing = 0

    def write(self, blocks: Ids, part: Part, data: np.ndarray) -> None:
        self.writing += 1
        time.sleep(0.3)
        super().write(blocks, part, data)
        self.writing -= 1


def test_move_into_a_slow_disk_has_its_outcome_in_time_and_is_quiesced_later():
    async def test() -> None:
        local = SlowDisk(filled(geometry(), seed=2))
        async with connected(filled(geometry(), seed=1)) as pair:
            ticket = pair.link.pull(pair.move(local, range(8), range(8), limit=0.1))
            result = await ticket.outcome
            assert len(result.failures) == 8
            assert not ticket.quiesced.done()
            assert local.writing == 1
            await ended(ticket)
            assert local.writing == 0

    run(test)


def test_connect_says_why_it_is_not_possible():
    async def test() -> None:
        memory, loop = filled(geometry(), seed=1), asyncio.get_running_loop()
        engine = GrpcEngine(Dialling(token=TOKEN, keepalive=Keepalive(interval=timedelta(seconds=1))))
        assert engine.export() is None
        began = loop.time()
        with pytest.raises(PeerLost, match="rank 0 of group"):
            await engine.connect(*metadata(memory.geometry, "127.0.0.1:1"), loop.time() + LIMIT)
        assert loop.time() - began < 1.0
        with pytest.raises(Unsupported, match="speaks TLS"):
            await engine.connect(*metadata(memory.geometry, "127.0.0.1:1", is_tls=True), loop.time() + LIMIT)
        with pytest.raises(Unsupported, match="without TLS"):
            await engine.connect(*metadata(memory.geometry, "worker.example:1"), loop.time() + LIMIT)
        async with block_peer.serving(Stuck(Lender(memory))) as address:
            wrong = GrpcEngine(Dialling(token="another token of the same length"))
            with pytest.raises(AyniError) as error:
                await wrong.connect(*metadata(memory.geometry, address), loop.time() + LIMIT)
            assert error.value.reason == "TOKEN_REFUSED"
            with pytest.raises(AyniError) as error:
                await engine.connect(*metadata(memory.geometry, address, incarnation=9), loop.time() + LIMIT)
            assert error.value.reason == "STALE_EPOCH"

    run(test)


@pytest.mark.parametrize("is_mutual", [False, True])
def test_blocks_move_through_tls(tmp_path, is_mutual):
    assert make_certs.main(["--out", str(tmp_path), "--host", "127.0.0.1"]) == 0
    server = ServerTls(
        certificate=tmp_path / "server.pem",
        key=tmp_path / "server.key",
        client_ca=tmp_path / "ca.pem" if is_mutual else None,
    )
    client = ClientTls(ca=tmp_path / "ca.pem", certificate=tmp_path / "client.pem", key=tmp_path / "client.key")

    async def test() -> None:
        lender, local = Lender(filled(geometry(), seed=1)), filled(geometry(), seed=2)
        async with block_peer.serving(Servicer(lender), tls=server) as address:
            engine, loop = GrpcEngine(Dialling(token=TOKEN, tls=client)), asyncio.get_running_loop()
            assert engine.capabilities.encrypted
            link = await engine.connect(*metadata(lender.memory.geometry, address, is_tls=True), loop.time() + LIMIT)
            pair = Pair(link, lender, Servicer(lender))
            assert not (await pair.pull(local, range(8), range(8))).failures
            await link.close()
        assert np.array_equal(blocks_of(local), blocks_of(lender.memory))

    run(test)


def test_busy_warm_up_block_does_not_keep_a_peer_from_being_connected():
    async def test() -> None:
        lender = Lender(filled(geometry(), seed=1))
        lender.busy = {0}
        async with block_peer.serving(Servicer(lender)) as address:
            loop = asyncio.get_running_loop()
            worker, export = metadata(lender.memory.geometry, address)
            link = await GrpcEngine(Dialling(token=TOKEN)).connect(worker, export, loop.time() + LIMIT)
            await link.close()

    run(test)


def test_large_block_is_asked_for_and_not_read_by_the_warm_up(monkeypatch):
    async def test() -> None:
        monkeypatch.setattr("worker_agent.blocks.engines.grpc_engine.MOST_WARM_UP_BYTES", 64)

        def refuse_memory(geometry: Geometry) -> Memory:
            raise AssertionError(f"memory for {geometry}")

        monkeypatch.setattr("worker_agent.blocks.engines.grpc_engine.allocate_host", refuse_memory)
        remote, local = filled(geometry(), seed=1), filled(geometry(), seed=2)
        async with connected(remote) as pair:
            assert not (await pair.pull(local, [1], [1])).failures
        lender = Lender(filled(geometry(), seed=1), incarnation=2)
        async with block_peer.serving(Servicer(lender)) as address:
            worker, export = metadata(lender.memory.geometry, address)
            with pytest.raises(AyniError, match="another incarnation"):
                await GrpcEngine(Dialling(token=TOKEN)).connect(worker, export, asyncio.get_running_loop().time() + 5)

    run(test)


class Silent(Servicer):
    """Holds the blocks of a write while `asleep`, whatever becomes of the call, and breaks the call itself."""

    def __init__(self, lender: Lender) -> None:
        super().__init__(lender)
        self.asleep, self.written = asyncio.Event(), asyncio.Event()

    async def WriteBlocks(self, requests: Any, context: Any) -> Any:  # noqa: N802
        await context.send_initial_metadata(streams.ACCEPTED)
        await anext(requests)
        await anext(requests)
        self.lender.busy |= {1, 2}
        self.written.set()
        if self.asleep.is_set():
            await asyncio.Event().wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")


@pytest.mark.parametrize("end", ["break", "cancel", "deadline"])
def test_push_without_an_answer_is_quiesced_when_the_peer_lets_its_blocks_be_read(end):
    async def test() -> None:
        async with connected(filled(geometry(), seed=1), Silent) as pair:
            assert isinstance(pair.servicer, Silent)
            if end != "break":
                pair.servicer.asleep.set()
            limit = 0.3 if end == "deadline" else LIMIT
            ticket = pair.link.push(pair.move(filled(geometry(), seed=2), [1, 2], [1, 2], limit=limit))
            await pair.servicer.written.wait()
            if end == "cancel":
                ticket.cancel()
            reason = {"break": "PEER_LOST", "cancel": "CANCELLED", "deadline": "DEADLINE"}[end]
            assert {failure.reason for _, failure in (await ticket.outcome).failures} == {reason}
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ticket.quiesced), 0.3 if end == "break" else 1.5)
            pair.lender.busy.clear()
            await ended(ticket)

    run(test)


def test_push_without_an_answer_is_let_go_when_the_link_is_closed():
    async def test() -> None:
        async with connected(filled(geometry(), seed=1), Silent) as pair:
            ticket = pair.link.push(pair.move(filled(geometry(), seed=2), [1, 2], [1, 2]))
            await ticket.outcome
            async with asyncio.timeout(2):
                await pair.link.close()
            assert ticket.quiesced.done()

    run(test)


EXPORTS = [b"", b"{", b"[]", b'{"address": 1, "tls": true}', b'{"address": "x", "tls": false}', b" " * 5000, b"\xff"]


@pytest.mark.parametrize("data", EXPORTS)
def test_export_that_is_none_is_refused(data):
    async def test() -> None:
        worker, export = metadata(geometry(), "127.0.0.1:1")
        broken = replace(export, data=data)
        with pytest.raises(AyniError, match="grpc export can't be read"):
            await GrpcEngine(Dialling(token=TOKEN)).connect(worker, broken, 1e9)

    run(test)


def test_options_of_the_channel_hold_all_three_keepalive_arguments():
    names = {name for name, _ in client_options(Keepalive(), loopback=True)}
    assert {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"} <= names


def test_frames_stay_below_the_limit_of_grpc():
    head = frames.ChunkHead(
        stream_offset_bytes=2**63, index=2**63, blocks=[2**63] * 1024, layers=(2**31, 2**32 - 1), offset_bytes=2**63
    )
    assert len(frames.encode_block_chunk(head, [bytes(frames.MAX_CHUNK_BYTES)], checksum=True)) < 4 << 20


def test_longest_list_of_one_call_fits_into_a_message():
    ids = 2**62 + np.arange(MOST_PER_CALL, dtype=np.int64) // 2 * 2**20 + np.arange(MOST_PER_CALL) % 2
    local = filled(geometry())
    move = Move(remote=descriptor(geometry()), remote_blocks=ids, local=local, local_blocks=ids, deadline=0.0)
    share = Share(move=move, first=0, remote_blocks=ids, local_blocks=ids, is_last=True)
    assert read_request(share, 2**64 - 1).ByteSize() < 4 << 20
    ids = ids * 1 + np.arange(MOST_PER_CALL)
    share = Share(move=move, first=0, remote_blocks=ids, local_blocks=ids, is_last=True)
    assert read_request(share, 2**64 - 1).ByteSize() < 4 << 20
