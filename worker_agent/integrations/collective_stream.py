"""One process's stream of CollectiveService: messages to the other processes of its group, and theirs.  [shell]"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Self

from grpc import aio

from ayni import PROTOCOL_VERSION
from ayni.channels import HeaderChannel, open_channel
from ayni.errors import AyniError, Deadline, PeerLost
from ayni.v1 import collective_pb2 as pb
from worker_agent import bridge
from worker_agent.client_config import ClientConfig
from worker_agent.coordinator import verdict
from worker_agent.faults import CoordinatorLost, CoordinatorUnreachable
from worker_agent.integrations.mailbox import Mailbox, Message
from worker_agent.reminders import reminders

SERVICE = pb.DESCRIPTOR.services_by_name["CollectiveService"].full_name

_PART_BYTES = 1 << 20
_GOODBYE_S = 5.0
_MOST_WAITING_BYTES = 4 << 30

_ANEW = "start all processes of the group again when the coordinator is back"

_log = logging.getLogger(__name__)


class CollectiveStream:
    """A process's place in a group. Thread-safe."""

    def __init__(self, channel: HeaderChannel, call: Any, welcome: pb.CollectiveWelcome, address: str) -> None:
        """For `open`."""
        self._bridge = bridge.shared()
        self.rank, self.names = welcome.rank, tuple(welcome.process_names)
        self.mailbox = Mailbox(_MOST_WAITING_BYTES)
        self._channel, self._call, self._address = channel, call, address
        self._queue: asyncio.Queue[tuple[Sequence[int], bytes, str, memoryview, Future[None]] | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        self._is_closed = False

    @property
    def world_size(self) -> int:
        """Processes of the group."""
        return len(self.names)

    @classmethod
    def open(cls, config: ClientConfig, group: str, world_size: int, rank: int | None, timeout: float) -> Self:
        """Enters a group, and waits until it is whole.

        Args:
            config: where the coordinator is.
            group: name of the group, the same for all.
            world_size: processes of the group.
            rank: this one's place; None for the next one that is free.
            timeout: seconds.

        Raises:
            AyniError: the coordinator refused, or not all processes came in time (`Deadline`).
            CoordinatorUnreachable: there is no coordinator.
        """
        hello = pb.CollectiveHello(
            protocol_version=PROTOCOL_VERSION,
            group=group,
            world_size=world_size,
            rank=rank,
            process_name=config.worker_name or f"{socket.gethostname()}-{os.getpid()}",
        )
        what = f"group {group!r} at {config.coordinator} to be whole"
        return bridge.shared().wait(cls._enter(config, hello, timeout), timeout + _GOODBYE_S, what)

    @classmethod
    async def _enter(cls, config: ClientConfig, hello: pb.CollectiveHello, within: float) -> Self:
        channel = open_channel(
            config.coordinator, config.token, config.tls, config.insecure, keepalive=config.keepalive
        )
        try:
            async with asyncio.timeout(min(within, config.connect_timeout.total_seconds())):
                await channel.channel_ready()
        except TimeoutError:
            await channel.close()
            raise CoordinatorUnreachable(
                f"no coordinator answers at {config.coordinator}: start it, or correct AYNI_COORDINATOR"
            ) from None
        call = channel.stream_stream(f"/{SERVICE}/Exchange")()
        try:
            waiting = f"waiting for all {hello.world_size} processes of group {hello.group!r} at {config.coordinator}"
            async with asyncio.timeout(within):
                await call.write(pb.ExchangeRequest(hello=hello).SerializeToString())
                with reminders(lambda: waiting):
                    data = await call.read()
            if data is aio.EOF:
                raise CoordinatorLost(
                    f"the coordinator at {config.coordinator} ended the group before it was whole; {_ANEW}"
                )
            return cls(channel, call, pb.ExchangeResponse.FromString(data).welcome, config.coordinator)
        except TimeoutError:
            await channel.close()
            raise Deadline(
                f"{hello.process_name} waited {within:g} s in vain for all {hello.world_size} processes of group "
                f"{hello.group!r}; the coordinator's log says which are missing",
                waiting_for=hello.group,
                timeout=within,
            ) from None
        except aio.AioRpcError as error:
            await channel.close()
            raise verdict(error, "Exchange", config.coordinator) from error
        except BaseException:
            await channel.close()
            raise

    def send(self, to: Sequence[int], key: bytes, about: str, data: memoryview) -> "Future[None]":
        """Sends a message to some ranks; `data` may change once the future is done.

        Returns:
            A future; it fails when the group is over.
        """
        future: Future[None] = Future()
        if to:
            self._bridge.call_soon(self._queue.put_nowait, (to, key, about, data, future))
        else:
            future.set_result(None)
        return future

    def close(self) -> None:
        """Leaves the group in order. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(AyniError):
                self._bridge.wait(self._leave(), 2 * _GOODBYE_S, "the goodbye to the group")

    def abort(self, reason: str) -> None:
        """Leaves without a goodbye: the group is over for all."""
        if not self._is_closed:
            self._is_closed = True
            sentence = f"rank {self.rank} has aborted the group: {reason}"
            self.mailbox.fail(PeerLost(sentence, peer=self.rank, detail=reason))
            self._bridge.wait(self._end(), _GOODBYE_S, "the end of the stream")

    async def _leave(self) -> None:
        self._queue.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await asyncio.wait(self._tasks)
        await self._end()

    async def _end(self) -> None:
        self.mailbox.fail(PeerLost(f"rank {self.rank} has left the group", peer=self.rank, detail="left"))
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self) -> None:
        try:
            while (message := await self._queue.get()) is not None:
                to, key, about, data, future = message
                for offset in range(0, max(1, len(data)), _PART_BYTES):
                    send = pb.CollectiveSend(
                        to=to,
                        key=key,
                        about=about,
                        total_bytes=len(data),
                        offset_bytes=offset,
                        data=bytes(data[offset : offset + _PART_BYTES]),
                    )
                    await self._call.write(pb.ExchangeRequest(send=send).SerializeToString())
                future.set_result(None)
            await self._call.write(pb.ExchangeRequest(bye=pb.CollectiveBye()).SerializeToString())
            await self._call.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            _log.debug("nothing more can be sent to the group: %s", error)

    async def _read(self) -> None:
        try:
            while (data := await self._call.read()) is not aio.EOF:
                self._take(pb.ExchangeResponse.FromString(data))
            self.mailbox.fail(
                CoordinatorLost(f"the coordinator at {self._address} ended the stream of the group; {_ANEW}")
            )
        except aio.AioRpcError as error:
            self.mailbox.fail(verdict(error, "Exchange", self._address))
        except AyniError as error:
            self.mailbox.fail(error)
            self._call.cancel()

    def _take(self, frame: pb.ExchangeResponse) -> None:
        if frame.HasField("delivery"):
            sender, send = frame.delivery.sender, frame.delivery.send
            message = Message(about=send.about, total_bytes=send.total_bytes)
            self.mailbox.deliver(sender, send.key, send.offset_bytes, send.data, message)
        elif frame.HasField("left"):
            self.mailbox.note_left(frame.left.rank, self.names[frame.left.rank])
        elif frame.HasField("lost"):
            rank, detail = frame.lost.rank, frame.lost.detail
            self.mailbox.fail(PeerLost(f"rank {rank} of the group is lost ({detail})", peer=rank, detail=detail))
