"""An agent that is reached over its own stream, in this process or as a program; a coordinator reduced to that.

Run as a program it serves blocks and attaches; its blocks hold `filled()`.
"""
# ruff: noqa: N802 -- methods are named after calls

import asyncio
import json
import os
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LayoutConfig, LocalLayout, Tier
from ayni.blocks.metadata import WorkerMetadata
from ayni.endpoints import ClientTls, ServerTls
from ayni.errors import UnknownWorker
from ayni.servers import TokenInterceptor, add_service, bind, make_server
from coordinator_service.attachments import Attachments
from coordinator_service.relay import add_relay
from tests.support.coordinator import TOKEN, environment
from worker_agent.attachment import AttachConfig, Attachment
from worker_agent.blocks.geometry import Geometry
from worker_agent.blocks_config import BlocksConfig
from worker_agent.messages import Membership
from worker_agent.serving import BlockService, ServiceConfig, block_service

HOST = LocalLayout(tier=Tier.HOST)
SESSION = "session-of-{}"
BLOCK_BYTES = 1 << 16


def membership(worker_id: int) -> Membership:
    return Membership(
        worker_id=worker_id,
        session=SESSION.format(worker_id),
        total_workers=1,
        run_id="attached",
        lease=timedelta(seconds=10),
        heartbeat_interval=timedelta(seconds=1),
        wire_type="float32",
    )


def filled(num_blocks: int, seed: int = 1) -> np.ndarray:
    """Rows for blocks, shape [num_blocks, BLOCK_BYTES]."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK_BYTES), np.uint8)


def hidden(metadata: WorkerMetadata) -> WorkerMetadata:
    """Returns what an agent exports that nobody can dial: nobody listens at its address."""
    data = json.dumps({"address": "127.0.0.1:1", "tls": False}).encode()
    engines = tuple(replace(e, data=data, crc32=zlib.crc32(data)) for e in metadata.engines if e.name == "grpc")
    return replace(metadata, engines=engines)


class Coordinator:
    """Attach, and the relay. Workers 0 to 3 are members."""

    def __init__(self) -> None:
        self.attachments = Attachments()
        self.members = set(range(4))

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async with aclosing(self.attachments.serve(requests, context, self._seat)) as frames:
            async for frame in frames:
                yield frame

    def has_session(self, session: str) -> bool:
        return session in {SESSION.format(number) for number in self.members}

    def _seat(self, worker_id: int, context: Any) -> Any:
        session = dict(context.invocation_metadata() or ()).get("ayni-session", "")
        if worker_id not in self.members or session != SESSION.format(worker_id):
            raise UnknownWorker(f"worker {worker_id} is no member", worker_id=worker_id)
        return SimpleNamespace(member=SimpleNamespace(worker_id=worker_id, name=f"ant{worker_id}"))

    async def until_attached(self, worker_id: int, is_attached: bool = True, limit: float = 10.0) -> None:
        async with asyncio.timeout(limit):
            while self.attachments.is_attached(worker_id) is not is_attached:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def coordinating(coordinator: Coordinator, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serves it; yields the address."""
    server = make_server(TokenInterceptor(TOKEN))
    add_service(server, "ayni.v1.CoordinatorService", coordinator)
    add_relay(server, coordinator.attachments, coordinator.has_session)
    address = bind(server, listen)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=None)


@asynccontextmanager
async def block_agent(folder: Path, num_blocks: int = 4, *engines: str, seed: int = 1) -> AsyncIterator[BlockService]:
    """Serves blocks; without blocks it has no layout."""
    config = ServiceConfig(
        listen="127.0.0.1:0",
        token=TOKEN,
        blocks=BlocksConfig(root=folder, engines=engines or ("grpc",)),
        tls=ClientTls(),
        server_tls=ServerTls(),
        insecure=False,
        model="attached",
    )
    async with block_service(config) as service:
        if num_blocks:
            shape = LayoutConfig(
                num_blocks=num_blocks,
                num_layers=1,
                outer_dim=1,
                page_size=1,
                inner_dim=BLOCK_BYTES,
                dtype_width_bytes=1,
                alignment_bytes=64,
            )
            await service.worker.allocate(HOST, Geometry(config=shape))
            await service.worker.write(HOST, as_ids(range(num_blocks)), filled(num_blocks, seed))
        yield service


def attachment_of(address: str, servicer: Any) -> Attachment:
    """An attachment that is not open yet; see `Attachment.follow`."""
    config = AttachConfig(coordinator=address, token=TOKEN, tls=ClientTls(), insecure=False)
    return Attachment(config, servicer)


@asynccontextmanager
async def attached(address: str, servicer: Any, worker_id: int = 0) -> AsyncIterator[Attachment]:
    attachment = attachment_of(address, servicer)
    attachment.follow(membership(worker_id))
    try:
        yield attachment
    finally:
        await attachment.close()


def start_program(address: str, folder: Path, worker_id: int, num_blocks: int) -> subprocess.Popen:
    """The agent as a process; killed by whoever starts it."""
    settings = {"address": address, "folder": str(folder), "worker_id": worker_id, "num_blocks": num_blocks}
    command = [sys.executable, "-m", "tests.support.attached_agent", json.dumps(settings)]
    return subprocess.Popen(command, env=environment() | {"PYTHONWARNINGS": "default"}, cwd=os.getcwd())


async def _main(settings: dict[str, Any]) -> None:
    async with (
        block_agent(Path(settings["folder"]), settings["num_blocks"]) as service,
        attached(settings["address"], service.servicer, settings["worker_id"]),
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
