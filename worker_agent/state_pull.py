"""Pulls a peer's train state into this worker's blocks, whatever the peer does with it meanwhile.  [shell]

The first try takes the best engine. A peer that publishes its next state meanwhile leaves a mixture behind; then its
state is pulled again over gRPC in one stream, for which the peer holds all of its blocks.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ayni import failpoints
from ayni.blocks.ids import as_ids
from ayni.blocks.layouts import LayoutDescriptor, LocalLayout, Tier
from ayni.blocks.messages import error_of
from ayni.blocks.metadata import WorkerMetadata
from ayni.blocks.transfers import RemoteBlocks, TransferOptions, TransferOutcome
from ayni.blocks.worker import Notification
from ayni.errors import AyniError, BlockBusy, Checksum, IncompatibleLayout, UnknownLayout
from worker_agent import train_state_format as fmt
from worker_agent.blocks.memory import Bytes
from worker_agent.blocks.worker import LocalBlockWorker

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

PLACE = LocalLayout(tier=Tier.HOST)
"""Where the train state lies: the primary resource of an agent that trains."""

_ROUTE = "train state"
_HOLDING = "grpc"
"""Engine for which a peer holds the blocks that it is asked for until they have been sent."""
_BUSY_S = 0.1
"""Pause before a peer that is publishing is asked again."""


class StatePull:
    """One peer's state, on its way here."""

    def __init__(self, worker: LocalBlockWorker, layout: LayoutDescriptor, peer: str, deadline: float) -> None:
        """Takes a layout of a peer that is imported; there is one of as many blocks here.

        Args:
            worker: whose blocks are filled.
            layout: of the peer's state.
            peer: its name, for people.
            deadline: moment on the event loop's clock.
        """
        self._worker, self._layout, self._peer, self._deadline = worker, layout, peer, deadline

    async def run(self, read: Callable[[], Awaitable[Bytes]], unpack: Callable[[Bytes], _T]) -> tuple[_T, str]:
        """Pulls until the state is whole; returns what `unpack` makes of it, and the engine that it came through.

        Args:
            read: returns all blocks that are here.
            unpack: called on a thread; raises what is wrong with them.

        Raises:
            AyniError: not all blocks came, or they are no state.
        """
        try:
            engine = await self._pull("", self._halves)
            return await asyncio.to_thread(unpack, await read()), engine
        except (BlockBusy, Checksum) as error:
            _log.info("reading again from worker %s: %s", self._peer, error)
        engine = await self._pull_held()
        return await asyncio.to_thread(unpack, await read()), engine

    @property
    def _halves(self) -> list[range]:
        """Both are pulled at the same time."""
        total = self._layout.config.num_blocks
        return [half for half in (range(total // 2), range(total // 2, total)) if half]

    async def _pull_held(self) -> str:
        """Pulls in one stream; a peer that is publishing at the moment is asked again, until the deadline."""
        everything = [range(self._layout.config.num_blocks)]
        while True:
            try:
                return await self._pull(_HOLDING, everything)
            except BlockBusy:
                if asyncio.get_running_loop().time() + _BUSY_S >= self._deadline:
                    raise
                await asyncio.sleep(_BUSY_S)

    async def _pull(self, engine: str, parts: list[range]) -> str:
        """Pulls all parts at the same time; returns the engines that they came through."""
        left = max(0.001, self._deadline - asyncio.get_running_loop().time())
        options = TransferOptions(timeout_s=left, drain_s=min(0.5, left / 2), route=_ROUTE, engine=engine)
        transfers = [
            self._worker.execute_remote_onboard(
                RemoteBlocks(layout=self._layout.handle, blocks=as_ids(part)), PLACE, part, options
            )
            for part in parts
        ]
        try:
            outcomes = [await self._ended(transfer) for transfer in transfers]
        except AyniError:
            for transfer in transfers:
                transfer.cancel()
            await asyncio.gather(*(transfer.quiesced() for transfer in transfers))
            raise
        except asyncio.CancelledError:
            for transfer in transfers:
                transfer.cancel()
            raise
        return ", ".join(dict.fromkeys(name for outcome in outcomes for name in outcome.engines))

    async def _ended(self, transfer: Notification) -> TransferOutcome:
        """Waits for a transfer; raises what it failed with."""
        (outcome,) = (await transfer.result()).outcomes
        if not outcome.is_done:
            raise _failure(outcome, self._peer)
        failpoints.hit("worker.onboarding.half")
        return outcome


def state_layout(metadata: WorkerMetadata, block_bytes: int, peer: str) -> LayoutDescriptor:
    """Returns the layout of a peer's state.

    Raises:
        UnknownLayout: it has none.
        IncompatibleLayout: its blocks have another size than this run's.
    """
    layout = next((layout for layout in metadata.layouts if layout.place == PLACE), None)
    if layout is None:
        raise UnknownLayout(f"worker {peer} has no train state in its host tier any more", layout=PLACE)
    expected = fmt.config_of(layout.config.num_blocks, block_bytes)
    if layout.config != expected:
        raise IncompatibleLayout(
            f"the host tier of worker {peer} holds no train state in blocks of {block_bytes} bytes (state.block_bytes)",
            field="block_bytes",
            source=layout.config.block_bytes,
            destination=block_bytes,
        )
    return layout


def _failure(outcome: TransferOutcome, peer: str) -> AyniError:
    """Returns what a pull that is not done failed with."""
    failure = outcome.refusal or outcome.failures[0].failure
    total = outcome.num_done + len(outcome.failures)
    error: AyniError = error_of(failure)
    told = type(error)(f"{len(outcome.failures)} of {total} blocks did not come from worker {peer}: {failure.message}")
    told.metadata = error.metadata
    return told
