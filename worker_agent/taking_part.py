"""How a worker takes part in exchanges among workers: its ways of exchange, and where others dial it.  [shell]"""

import asyncio
from functools import partial

from ayni.channels import open_channel
from ayni.endpoints import Address, parse_address
from ayni.settings import SettingsError
from worker_agent.client_config import ClientConfig
from worker_agent.host_calls import HostPeers
from worker_agent.host_service import serving_host
from worker_agent.peer_exchange import ShardedExchange
from worker_agent.peer_regions import PeerRegions
from worker_agent.peer_service import listening
from worker_agent.slice_rounds import SliceRounds
from worker_agent.standing import Standing
from worker_agent.torch_collectives import own_accelerator
from worker_agent.torch_exchange import TorchConfig, TorchExchange
from worker_agent.torch_store import RendezvousStore, dialable


async def take_part(config: ClientConfig, standing: Standing, rounds: SliceRounds | None, backend: str) -> None:
    """Gives a worker its ways of exchange. One that is not elastic has none: it does not contribute again.

    Args:
        config: where others dial the worker, and how it dials them.
        standing: of the worker.
        rounds: of its slices, where a server of its own serves them already; None: they are served here, if the
            configuration says where to listen.
        backend: where the worker computes.

    Raises:
        OSError: the port is in use.
        SettingsError: the address is wrong, or TLS is missing.
    """
    if not config.elastic:
        return
    peers, own = standing.peers, rounds or SliceRounds()
    peers.address = config.peer_address
    if rounds is None and config.peer_listen:
        server = listening(own, config.peer_listen, config.token, config.server_tls, config.insecure)
        address = await peers.server.enter_async_context(server)
        bound = parse_address(address)
        peers.address = peers.address or str(Address(host=dialable(bound.host), port=bound.port))
    dial = partial(
        open_channel, token=config.token, tls=config.tls, insecure=config.insecure, keepalive=config.keepalive
    )
    near = await _near(standing, own) if rounds or config.peer_listen else None
    peers.exchanges["sharded"] = ShardedExchange(own, dial, standing.traffic, peers.lost, near)
    if config.store_listen:
        peers.exchanges["torch"] = await _torch_exchange(config, standing, backend)


async def _near(standing: Standing, rounds: SliceRounds) -> HostPeers | None:
    """Opens a socket for workers of this host; returns how others' are reached, None where nothing is shared."""
    if not standing.vectors.is_wanted:
        return None
    regions = PeerRegions()
    offer = await standing.peers.server.enter_async_context(serving_host(rounds, regions))
    if offer is None:
        return None
    standing.peers.shared_memory = offer
    rounds.stores.regions = standing.vectors.regions
    return HostPeers(standing.vectors, regions)


async def _torch_exchange(config: ClientConfig, standing: Standing, backend: str) -> TorchExchange:
    """Opens the worker's store; loads torch, if that was not done yet.

    Raises:
        SettingsError: what torch sends could be read on the way, and nobody said that this is meant.
    """
    host = config.store_listen
    if not (Address(host=host, port=0).is_loopback or config.insecure):
        raise SettingsError(
            f"topology torch sends gradients in clear, and listening at {host} shows them to the network: accept the "
            "risk with --insecure, or use topology sharded, which knows TLS"
        )
    store = await asyncio.to_thread(RendezvousStore, host, dialable(host))
    standing.peers.store_address = store.address
    own = TorchConfig(
        worker_name=standing.worker_name,
        accelerator=await asyncio.to_thread(own_accelerator, backend),
        reduce_s=config.exchange_timeout.total_seconds(),
    )
    return TorchExchange(own, store, standing.peers.lost)
