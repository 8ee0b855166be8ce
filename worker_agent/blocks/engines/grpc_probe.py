"""Asking a peer for a block without taking it: whether it is there, and whether it has let go of the block.  [shell]

A peer holds the blocks of a write for as long as a byte of it can land, and refuses to read them meanwhile. So a write
whose answer was lost has ended once the peer begins to read one of its blocks, or refuses for another reason, or nobody
listens at its address any more. A peer that stands still says nothing, and goes on with what it has received when it
wakes.
"""

import asyncio

import grpc

from ayni import rpc
from ayni.blocks.ids import Ids
from ayni.blocks.layouts import LayoutHandle
from ayni.blocks.messages import handle_message, ids_message
from ayni.errors import BlockBusy
from ayni.v1 import worker_pb2 as pb
from worker_agent.blocks.engines.grpc_calls import StartRead

_ASK_S = 2.0
"""Longest wait for an answer; then a fresh attempt is made."""
_ASK_AGAIN_S = 0.2
_REFUSED = "Connection refused"
"""In gRPC's text where a host answers that no process listens on the port; it has no code for that."""


class Probe:
    """Asks one peer."""

    def __init__(self, start: StartRead, incarnation: int) -> None:
        """Takes the peer's ReadBlocks, and the incarnation that layouts are known from."""
        self._start, self._incarnation = start, incarnation

    async def begin(self, layout: LayoutHandle, blocks: Ids, limit_s: float) -> None:
        """Has the peer begin to read blocks, and ends the call.

        Raises:
            grpc.aio.AioRpcError: the peer refused, or can't be reached.
        """
        request = pb.ReadBlocksRequest(
            layout=handle_message(layout), incarnation=self._incarnation, blocks=ids_message(blocks)
        )
        call = self._start(request, timeout=limit_s)
        try:
            await call.read()
        finally:
            call.cancel()

    async def until_released(self, layout: LayoutHandle, blocks: Ids) -> None:
        """Returns once no byte of a write of these blocks can land. Lasts until then."""
        # Only asking tells: a peer that wakes announces nothing.
        while not await self._is_released(layout, blocks):  # noqa: ASYNC110
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _is_released(self, layout: LayoutHandle, blocks: Ids) -> bool:
        try:
            await self.begin(layout, blocks, _ASK_S)
        except grpc.RpcError as error:
            if refusal := rpc.error_from(error):
                return not isinstance(refusal, BlockBusy)
            return _REFUSED in str(error.details())
        return True
