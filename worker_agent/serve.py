"""An agent that only serves blocks: has layouts, listens, carries out what a leader asks for.  [shell]"""

import asyncio
import logging

from ayni.blocks.layouts import Tier
from ayni.errors import AyniError
from ayni.process import DONE, load_token, load_yaml
from ayni.settings import SettingsError, from_mapping
from worker_agent.blocks.worker import LocalBlockWorker
from worker_agent.blocks_config import ServeConfig
from worker_agent.layouts_file import LayoutsFile
from worker_agent.serving import ServiceConfig, serving

_log = logging.getLogger(__name__)


async def serve(config: ServeConfig, stop: asyncio.Event) -> int:
    """Serves until `stop` is set; returns the process's exit code.

    Prints one line, "listening on HOST:PORT", to standard output once it can be called and its layouts are there.

    Raises:
        SettingsError: the layouts file is wrong, or a layout can't be made: memory, disk.
        OSError: the port is in use.
    """
    layouts = from_mapping(LayoutsFile, load_yaml(config.layouts))
    service = ServiceConfig(
        listen=config.listen,
        token=load_token(config.token_file),
        blocks=config.blocks,
        tls=config.tls,
        server_tls=config.server_tls,
        insecure=config.insecure,
        limits=config.limits,
        model=layouts.model,
    )
    async with serving(service) as worker:
        await _add_layouts(worker, layouts)
        print(f"listening on {worker.bound}", flush=True)
        _log.info("serving %d layouts, %.1f MB", len(layouts.layouts), worker.layout_bytes / 1e6)
        await stop.wait()
        for route, traffic in worker.traffic.items():
            _log.info(
                "%s: %d blocks, %.1f MB in %d transfers; %d blocks failed",
                route,
                traffic.num_blocks,
                traffic.num_bytes / 1e6,
                traffic.num_transfers,
                traffic.num_failed,
            )
    return DONE


async def _add_layouts(worker: LocalBlockWorker, layouts: LayoutsFile) -> None:
    for entry in sorted(layouts.layouts, key=lambda e: list(Tier).index(e.place.tier)):
        try:
            await worker.allocate(entry.place, entry.geometry())
        except AyniError as error:
            raise SettingsError(f"{entry.place}: {error.message}") from error
