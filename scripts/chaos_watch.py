"""What the coordinator says of the run, through every restart of it."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from ayni.channels import open_channel
from ayni.messages import duration
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import coordinator_pb2_grpc

_INTERVAL_S = 0.05
_PAUSE_S = 0.1
_SILENCE_S = 20.0


class Watch:
    """Follows WatchRun."""

    def __init__(self, address: str, token: str, insecure: bool, on_change: Callable[[], None]) -> None:
        self._address, self._token, self._insecure, self._on_change = address, token, insecure, on_change
        self.committed = 0
        """Steps that are committed, as said last. Goes back when the run does."""
        self.changed = time.monotonic()
        """When `committed` changed last."""
        self.up_to_date: frozenset[str] = frozenset()
        """Names of the workers whose parameters are the run's."""
        self.state = pb.RUN_STATE_UNSPECIFIED
        self.waiting = ""
        self._ids: dict[str, int] = {}
        self._gone: dict[str, int | None] = {}

    def forget(self, name: str) -> None:
        """Says that a new process has this worker's name: what was said of the one before counts no more."""
        self._gone[name] = self._ids.get(name)
        self.up_to_date -= {name}

    @property
    def ended(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.state in (pb.RUN_STATE_FINISHED, pb.RUN_STATE_HALTED)

    async def follow(self) -> None:
        """Follows until the run has ended."""
        while not self.ended:
            async with open_channel(self._address, self._token, insecure=self._insecure) as channel:
                try:
                    await self._read(coordinator_pb2_grpc.CoordinatorServiceStub(channel))
                except (grpc.aio.AioRpcError, TimeoutError):
                    pass  # The coordinator is down, which is a part of the game.
            await asyncio.sleep(_PAUSE_S)

    async def _read(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> None:
        call: Any = stub.WatchRun(pb.WatchRunRequest(min_interval=duration(_INTERVAL_S)))
        while not self.ended:
            async with asyncio.timeout(_SILENCE_S):
                response = await call.read()
            if response is grpc.aio.EOF:
                return
            self._take(response.snapshot)

    def _take(self, snapshot: pb.RunSnapshot) -> None:
        if snapshot.committed_steps != self.committed:
            self.committed, self.changed = snapshot.committed_steps, time.monotonic()
        self._ids.update({worker.worker_name: worker.worker_id for worker in snapshot.workers})
        if self.committed:
            self.up_to_date = frozenset(
                worker.worker_name
                for worker in snapshot.workers
                if worker.share > 0 and not worker.following and self._gone.get(worker.worker_name) != worker.worker_id
            )
        self.state, self.waiting = snapshot.state, snapshot.waiting.reason
        self._on_change()
