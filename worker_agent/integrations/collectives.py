"""Collectives of torch.distributed over messages among the processes of a group.  [shell]

Every collective has a number, the same on all ranks, because all make the same calls in the same order. Reductions add
in the order of ranks, in float32 where the elements are narrower, so all ranks have the same bytes and each run has
them again. Small tensors go to everybody whole; larger ones of more than two ranks in slices, of which each rank
reduces one.

Legend: n ranks, E elements.
"""

import hashlib
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ayni.errors import Deadline, Unsupported
from worker_agent.integrations.collective_stream import CollectiveStream
from worker_agent.integrations.combining import check_reducible, combined
from worker_agent.integrations.mailbox import Message

_SMALL_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One collective in progress."""

    number: int
    name: str
    deadline: float
    timeout: float
    sending: list[Future[None]] = field(default_factory=list, compare=False)
    """What is being sent."""


class Collectives:
    """The collectives of one process group. Thread-safe: messages are told apart by the call's number."""

    def __init__(self, stream: CollectiveStream, ranks: Sequence[int], group_id: str) -> None:
        """Works within some ranks of a stream's group.

        Args:
            stream: messages.
            ranks: the group's processes, as ranks of the stream, in the order of their ranks here.
            group_id: the same on all of them, and another one for each group.
        """
        self._stream, self._ranks, self._group_id = stream, tuple(ranks), group_id
        self.rank = self._ranks.index(stream.rank)
        self._prefix = hashlib.sha256(f"{group_id} {self._ranks}".encode()).digest()[:16]

    @property
    def size(self) -> int:
        """Processes of the group."""
        return len(self._ranks)

    def reduced(self, call: Call, tensor: Tensor, op: Any) -> Tensor:
        """Returns the reduction over all ranks, of the tensor's shape."""
        check_reducible(tensor.dtype, op)
        flat_E = _flat(tensor)
        if self.size <= 2 or flat_E.nbytes <= _SMALL_BYTES:
            return combined(self.gathered(call, flat_E), op).view(tensor.shape)
        slices = list(torch.tensor_split(flat_E, self.size))
        mine = combined(self.exchanged(call, slices, [slices[self.rank]] * self.size), op)
        return torch.cat(self.gathered(call, mine, slices)).view(tensor.shape)

    def reduced_slice(self, call: Call, inputs: Sequence[Tensor], op: Any) -> Tensor:
        """Returns the reduction of the input that has this rank's number."""
        check_reducible(inputs[self.rank].dtype, op)
        flats = [_flat(tensor) for tensor in inputs]
        own = flats[self.rank]
        return combined(self.exchanged(call, flats, [own] * self.size), op).view(inputs[self.rank].shape)

    def gathered(self, call: Call, mine: Tensor, like: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Returns every rank's tensor, by rank; `like` has their shapes where they differ."""
        flat_E = _flat(mine)
        self._send([rank for rank in range(self.size) if rank != self.rank], call, "g", flat_E)
        found = [
            flat_E if rank == self.rank else self._take(rank, call, "g", like[rank] if like else flat_E, self.size - 1)
            for rank in range(self.size)
        ]
        self._settle(call)
        return found

    def exchanged(self, call: Call, outgoing: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Sends each rank its tensor, and returns what each rank has sent; `like` has the shapes of that."""
        for rank, tensor in enumerate(outgoing):
            if rank != self.rank:
                self._send([rank], call, "x", _flat(tensor))
        found = [
            _flat(outgoing[rank]) if rank == self.rank else self._take(rank, call, "x", like[rank], self.size - 1)
            for rank in range(self.size)
        ]
        self._settle(call)
        return found

    def spread(self, call: Call, tensor: Tensor, root: int) -> Tensor:
        """Returns rank `root`'s tensor, of the shape of this one."""
        if self.rank == root:
            self._send([rank for rank in range(self.size) if rank != root], call, "b", _flat(tensor))
            self._settle(call)
            return tensor
        return self._take(root, call, "b", tensor).view(tensor.shape)

    def collected(self, call: Call, mine: Tensor, root: int) -> list[Tensor] | None:
        """Returns every rank's tensor to rank `root`, None to the others."""
        if self.rank != root:
            self._send([root], call, "c", _flat(mine))
            self._settle(call)
            return None
        return [
            _flat(mine) if rank == root else self._take(rank, call, "c", mine, self.size - 1)
            for rank in range(self.size)
        ]

    def handed_out(self, call: Call, outgoing: Sequence[Tensor] | None, like: Tensor, root: int) -> Tensor:
        """Returns this rank's one of the tensors that rank `root` has."""
        if self.rank != root:
            return self._take(root, call, "s", like)
        assert outgoing is not None
        for rank, tensor in enumerate(outgoing):
            if rank != root:
                self._send([rank], call, "s", _flat(tensor))
        self._settle(call)
        return _flat(outgoing[root])

    def post(self, call: Call, tensor: Tensor, to: int, tag: int) -> None:
        """Sends a tensor to one rank, which asks for it with the same tag."""
        self._send([to], call, f"p{tag}", _flat(tensor))
        self._settle(call)

    def received(self, call: Call, like: Tensor, sender: int, tag: int) -> Tensor:
        """Returns what a rank has posted with a tag."""
        return self._take(sender, call, f"p{tag}", like)

    def _send(self, to: Sequence[int], call: Call, phase: str, flat_E: Tensor) -> None:
        self._stream.mailbox.check()
        array: Any = flat_E.view(torch.uint8).numpy()
        data = memoryview(array if flat_E.numel() else b"")
        ranks = [self._ranks[rank] for rank in to]
        call.sending.append(self._stream.send(ranks, self._key(call, phase), _about(call, flat_E), data))

    def _take(self, sender: int, call: Call, phase: str, like: Tensor, last: int = -1) -> Tensor:
        """Returns what a rank has sent; the collective needs the ranks up to `last` too."""
        expected = Message(about=_about(call, like), total_bytes=like.numel() * like.element_size())
        who = f"rank {self.rank} of group {self._group_id[:40]!r}"
        left = max(0.0, call.deadline - time.monotonic())
        try:
            needed = [rank for rank in range(sender, max(sender, last) + 1) if rank != self.rank]
            wanted = [(self._ranks[rank], self._key(call, phase)) for rank in needed]
            data = self._stream.mailbox.take(wanted, expected, left, who)
        except Deadline as error:
            raise Deadline(
                f"{who} waited {call.timeout:g} s in vain for rank {sender} in {expected.about}", **error.metadata
            ) from None
        if not data:
            return torch.empty(0, dtype=like.dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(like.dtype)

    def _settle(self, call: Call) -> None:
        """Waits until what was sent may change."""
        for future in call.sending:
            while True:
                self._stream.mailbox.check()
                try:
                    future.result(min(0.5, max(0.0, call.deadline - time.monotonic())))
                    break
                except TimeoutError:
                    if time.monotonic() >= call.deadline:
                        sentence = f"rank {self.rank} could not send its part of {call.name} within {call.timeout:g} s"
                        raise Deadline(sentence, waiting_for="room", timeout=call.timeout) from None

    def _key(self, call: Call, phase: str) -> bytes:
        return self._prefix + struct.pack("<q", call.number) + phase.encode()


def _about(call: Call, tensor: Tensor) -> str:
    return f"{call.name} #{call.number}, {str(tensor.dtype).removeprefix('torch.')} [{tensor.numel()}]"


def _flat(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise Unsupported(
            f"a tensor of layout {tensor.layout} can't be sent by backend ayni; make it dense (to_dense())",
            field="layout",
            detail=str(tensor.layout),
        )
    if tensor.is_quantized:
        raise Unsupported(
            f"a quantized tensor ({tensor.dtype}) can't be sent by backend ayni: its scale would be lost; send its "
            "int_repr() and its scale, or dequantize() it",
            field="dtype",
            detail=str(tensor.dtype),
        )
    return tensor.detach().to("cpu").contiguous().reshape(-1)
