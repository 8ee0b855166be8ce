"""Starts and stops a worker's own service: engines, the block half, the gRPC server.  [shell]

gRPC logs an error with a traceback whenever a peer that is sent blocks goes away or gives up. That is the peer's to
tell, and happens with every pull that is cancelled, so here it is a line for debugging.
"""

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ayni.endpoints import Address, ClientTls, ServerLimits, ServerTls, parse_address
from ayni.servers import TokenInterceptor, add_health_and_reflection, bind, make_server
from worker_agent.block_engines import announce, make_engines
from worker_agent.blocks.engines.grpc_engine import Relays
from worker_agent.blocks.worker import LocalBlockWorker
from worker_agent.blocks_config import BlocksConfig
from worker_agent.peer_service import SERVICE as PEER_SERVICE
from worker_agent.peer_service import PeerServicer
from worker_agent.service import SERVICE, WorkerServicer
from worker_agent.slice_rounds import SliceRounds

_GRACE_S = 2.0

_log = logging.getLogger(__name__)
_SERVER_LOG = logging.getLogger("grpc._cython.cygrpc")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """How a worker's own service listens and reaches others."""

    listen: str
    token: str
    blocks: BlocksConfig
    tls: ClientTls
    server_tls: ServerTls
    insecure: bool
    limits: ServerLimits = field(default_factory=ServerLimits)
    model: str = ""
    """Name of the model whose blocks the worker holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockService:
    """A worker's own service while it runs."""

    worker: LocalBlockWorker
    servicer: WorkerServicer
    """Answers the calls that come through the server; others may come through an attachment."""
    rounds: SliceRounds = field(default_factory=SliceRounds)
    """Slices that it reduces for other workers; served beside the blocks."""
    relays: Relays = field(default_factory=dict)
    """Peers that this worker reaches through somebody else."""


@asynccontextmanager
async def serving(config: ServiceConfig) -> AsyncIterator[LocalBlockWorker]:
    """Serves the block half as `block_service`; yields the worker."""
    async with block_service(config) as service:
        yield service.worker


@asynccontextmanager
async def block_service(config: ServiceConfig) -> AsyncIterator[BlockService]:
    """Serves the block half as long as the context lasts; the worker's `address` is where it listens.

    Raises:
        OSError: the port is in use.
        SettingsError: no engine is possible, or TLS is missing.
    """
    _SERVER_LOG.addFilter(_is_no_lost_peer)
    relays: Relays = {}
    server = make_server(TokenInterceptor(config.token, config.limits), limits=config.limits)
    engines = make_engines(config.blocks, config.token, config.tls, config.insecure, relays)
    worker = LocalBlockWorker(engines=engines, config=config.blocks, model=config.model)
    try:
        servicer = WorkerServicer(worker, worker.lending)
        servicer.add_to(server)
        rounds = SliceRounds()
        PeerServicer(rounds).add_to(server)
        health = await add_health_and_reflection(server, [SERVICE.full_name, PEER_SERVICE.full_name])
        worker.bound = bind(server, config.listen, config.server_tls, config.insecure)
        worker.address = _dialable(worker.bound)
        announce(engines, worker.address, config.server_tls.is_on, worker.notify)
        await server.start()
        yield BlockService(worker=worker, servicer=servicer, rounds=rounds, relays=relays)
        await health.enter_graceful_shutdown()
    finally:
        await server.stop(grace=_GRACE_S)
        await worker.close()


def _is_no_lost_peer(record: logging.LogRecord) -> bool:
    """Says whether an event of gRPC's is anything else than a message that could not be sent any more."""
    if not record.exc_info or type(record.exc_info[1]).__name__ != "ExecuteBatchError":
        return True
    _log.debug("a peer went away before it had all of an answer: %s", record.getMessage())
    return False


def _dialable(address: str) -> str:
    """Returns the address that others may dial: a wildcard means this host."""
    parsed = parse_address(address)
    if parsed.host in ("0.0.0.0", "::"):
        return str(Address(host=socket.gethostname(), port=parsed.port))
    return address
