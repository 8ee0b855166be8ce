"""A process group of torch.distributed over a stream to the coordinator.  [shell]

Methods and options are torch's; docstrings say what is ours. Threads carry out the group's collectives, several at a
time. They begin in the order of the calls; who needs the result of one for another waits for it, as with Gloo. What a
method can't do raises `Unsupported`.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ayni.errors import SpecMismatch
from worker_agent.integrations.c10d_work import AyniWork
from worker_agent.integrations.collective_stream import CollectiveStream
from worker_agent.integrations.collectives import Call, Collectives
from worker_agent.integrations.combining import check_reducible, combined
from worker_agent.integrations.daemon_threads import DaemonThreads

BACKEND = "ayni"

_ProcessGroup: Any = dist.ProcessGroup
"""Its stubs differ between versions of torch."""

_THREADS = 4
"""Collectives of a group that are under way at a time, and as many sends."""
_MOST_RECEIVES = 256
"""Receives that wait at a time. A program may ask for many before anybody sends, or before it sends itself."""

Work = Callable[[list[Call]], None]


class AyniProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """One group of ranks."""

    def __init__(
        self,
        stream: CollectiveStream,
        ranks: Sequence[int],
        group_id: str,
        timeout: timedelta,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes a group of some ranks of a stream's group; `timeout` bounds each collective."""
        self._collectives = Collectives(stream, ranks, group_id)
        super().__init__(self._collectives.rank, len(ranks))
        self._stream, self._group_id, self._timeout_s = stream, group_id, timeout.total_seconds()
        self._on_shutdown = on_shutdown
        self._threads: DaemonThreads | None = DaemonThreads(_THREADS, "ayni-collectives")
        self._sending = DaemonThreads(_THREADS, "ayni-sends")
        self._receiving = DaemonThreads(_MOST_RECEIVES, "ayni-receives")
        self._under_way: list[Future[None]] = []
        self._number = 0
        self._posts: Counter[tuple[str, int, int]] = Counter()

    def getBackendName(self) -> str:  # noqa: N802
        """Returns "ayni"."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """Name among this process's groups."""
        return self._group_id

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long a collective may take."""
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leaves the group in order, after what is under way."""
        if self._threads is not None:
            threads, self._threads = self._threads, None
            threads.finish()
            self._sending.finish()
            self._receiving.finish()
            self._on_shutdown()

    def abort(self) -> None:
        """Ends all groups of the process at once, and the others' groups with them."""
        self._stream.abort("it called abort()")
        self.shutdown()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> AyniWork:
        """Reduces each tensor over all ranks, in place."""

        def work(calls: list[Call]) -> None:
            for call, tensor in zip(calls, tensors, strict=True):
                tensor.copy_(self._collectives.reduced(call, tensor, _op(opts)))

        return self._start("allreduce", opts, work, tensors, len(tensors))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> AyniWork:
        """Reduces several tensors as `allreduce`."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> AyniWork:
        """Reduces to rank `rootRank`."""
        root = _root(opts)

        def work(calls: list[Call]) -> None:
            for call, tensor in zip(calls, tensors, strict=True):
                check_reducible(tensor.dtype, _op(opts))
                if (parts := self._collectives.collected(call, tensor, root)) is not None:
                    tensor.copy_(combined(parts, _op(opts)).view(tensor.shape))

        return self._start("reduce", opts, work, tensors, len(tensors))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> AyniWork:
        """Gives all ranks rank `rootRank`'s tensors."""
        root = _root(opts)

        def work(calls: list[Call]) -> None:
            for call, tensor in zip(calls, tensors, strict=True):
                tensor.copy_(self._collectives.spread(call, tensor, root))

        return self._start("broadcast", opts, work, tensors, len(tensors))

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> AyniWork:
        """Gathers each rank's tensors on all ranks."""

        def work(calls: list[Call]) -> None:
            for call, outputs, tensor in zip(calls, output_tensors, input_tensors, strict=True):
                self._check_count("all_gather", outputs)
                _fill(outputs, self._collectives.gathered(call, tensor, outputs))

        return self._start("all_gather", opts, work, [t for ts in output_tensors for t in ts], len(input_tensors))

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> AyniWork:
        """Gathers several tensors; outputs are by rank, then by tensor."""
        by_tensor = [[outputs[index] for outputs in output_lists] for index in range(len(input_list))]
        return self.allgather(by_tensor, input_list, opts)

    def all_gather_single_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> AyniWork:
        """Gathers tensors into one tensor each, rank after rank."""

        def work(calls: list[Call]) -> None:
            for call, output, tensor in zip(calls, output_lists, input_list, strict=True):
                self._check_elements("all_gather_into_tensor", output, tensor)
                parts = self._collectives.gathered(call, tensor)
                output.copy_(torch.cat([part.reshape(-1) for part in parts]).view(output.shape))

        return self._start("all_gather_into_tensor", opts, work, output_lists, len(input_list))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> AyniWork:
        """Gathers into one tensor, rank after rank."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> AyniWork:
        """Reduces, and gives rank r the r-th result."""

        def work(calls: list[Call]) -> None:
            for call, output, inputs in zip(calls, output_tensors, input_tensors, strict=True):
                self._check_count("reduce_scatter", inputs)
                output.copy_(self._collectives.reduced_slice(call, inputs, _op(opts)).view(output.shape))

        return self._start("reduce_scatter", opts, work, output_tensors, len(output_tensors))

    def reduce_scatter_single_coalesced(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> AyniWork:
        """Reduces tensors, and gives rank r the r-th part of each."""
        for output, tensor in zip(output_tensors, input_tensors, strict=True):
            self._check_elements("reduce_scatter_tensor", tensor, output)
        parts = [list(tensor.reshape(-1).chunk(self.size())) for tensor in input_tensors]
        return self.reduce_scatter(output_tensors, parts, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> AyniWork:
        """Reduces, and gives rank r the r-th part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None) -> AyniWork:
        """Gathers on rank `rootRank`."""
        root = _root(opts)

        def work(calls: list[Call]) -> None:
            parts = self._collectives.collected(calls[0], input_tensors[0], root)
            if parts is not None:
                self._check_count("gather", output_tensors[0])
                _fill(output_tensors[0], parts)

        return self._start("gather", opts, work, output_tensors[0] if output_tensors else [])

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None) -> AyniWork:
        """Gives rank r the r-th tensor of rank `rootRank`."""
        root = _root(opts)

        def work(calls: list[Call]) -> None:
            outgoing = input_tensors[0] if self.rank() == root else None
            if outgoing is not None:
                self._check_count("scatter", outgoing)
            found = self._collectives.handed_out(calls[0], outgoing, output_tensors[0], root)
            output_tensors[0].copy_(found.view(output_tensors[0].shape))

        return self._start("scatter", opts, work, output_tensors)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> AyniWork:
        """Gives rank r the r-th input of every rank."""

        def work(calls: list[Call]) -> None:
            self._check_count("all_to_all", output_tensors)
            self._check_count("all_to_all", input_tensors)
            _fill(output_tensors, self._collectives.exchanged(calls[0], input_tensors, output_tensors))

        return self._start("all_to_all", opts, work, output_tensors)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> AyniWork:
        """Gives rank r the r-th part of every rank's input; parts are cut along the first axis."""
        outputs = self._parts("all_to_all_single", output, output_split_sizes)
        inputs = self._parts("all_to_all_single", input, input_split_sizes)
        return self.alltoall(outputs, inputs, opts)

    def barrier(self, opts: Any = None) -> AyniWork:
        """Waits for all ranks, and for what was called before."""
        before = [outcome for outcome in self._under_way if not outcome.done()]

        def work(calls: list[Call]) -> None:
            wait(before, max(0.0, calls[0].deadline - time.monotonic()))
            self._collectives.gathered(calls[0], torch.empty(0, dtype=torch.uint8))

        return self._start("barrier", opts, work, [])

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> AyniWork:
        """Sends to one rank. Posts with the same tag arrive in order; they do not wait for collectives."""
        call = self._post("send", dstRank, tag)
        return self._submit(self._sending, lambda: self._collectives.post(call(), tensors[0], dstRank, tag), tensors)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> AyniWork:
        """Receives what one rank has sent with this tag."""
        call = self._post("recv", srcRank, tag)

        def work() -> None:
            found = self._collectives.received(call(), tensors[0], srcRank, tag)
            tensors[0].copy_(found.view(tensors[0].shape))

        return self._submit(self._receiving, work, tensors)

    # Names of torch before 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start(self, name: str, opts: Any, work: Work, tensors: list[Tensor], count: int = 1) -> AyniWork:
        """Has the group's thread carry out a collective that uses so many numbers."""
        first, self._number = self._number, self._number + count
        timeout = _timeout_s(opts) or self._timeout_s

        def run() -> None:
            deadline = time.monotonic() + timeout
            work([Call(number=n, name=name, deadline=deadline, timeout=timeout) for n in range(first, first + count)])

        return self._submit(self._threads, run, tensors)

    def _post(self, name: str, rank: int, tag: int) -> Callable[[], Call]:
        """Numbers a post among those between two ranks with the same tag, in one direction."""
        number = self._posts[(name, rank, tag)]
        self._posts[(name, rank, tag)] += 1
        timeout = self._timeout_s
        what = f"send/recv with tag {tag}"
        return lambda: Call(number=number, name=what, deadline=time.monotonic() + timeout, timeout=timeout)

    def _submit(self, threads: DaemonThreads | None, work: Callable[[], None], tensors: list[Tensor]) -> AyniWork:
        if threads is None or self._threads is None:
            raise RuntimeError(f"process group {self._group_id!r} was destroyed; no collective can be called on it")

        def without_graph() -> None:
            with torch.no_grad():
                work()

        outcome = threads.submit(without_graph)
        self._under_way = [*(other for other in self._under_way if not other.done()), outcome]
        return AyniWork(outcome, tensors)

    def _parts(self, name: str, tensor: Tensor, sizes: list[int]) -> list[Tensor]:
        if not sizes:
            if tensor.size(0) % self.size():
                raise ValueError(f"{name}: {tensor.size(0)} rows can't be cut into {self.size()} equal parts")
            return list(tensor.chunk(self.size())) if tensor.size(0) else [tensor] * self.size()
        return list(tensor.split(sizes))

    def _check_count(self, name: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{name} needs one tensor for each of {self.size()} ranks; {len(tensors)} were given")

    def _check_elements(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise SpecMismatch(
                f"{name}: {whole.dtype} {list(whole.shape)} is not {self.size()} times {part.dtype} {list(part.shape)}",
                field="num_elements",
                expected=part.numel() * self.size(),
                received=whole.numel(),
                bucket=name,
            )


def _fill(outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part.view(output.shape))


def _op(opts: Any) -> Any:
    return ReduceOp.SUM if opts is None else opts.reduceOp


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)


def _timeout_s(opts: Any) -> float:
    """Returns what the caller of a collective allows; 0 for not said."""
    timeout = getattr(opts, "timeout", None)
    return max(0.0, timeout.total_seconds()) if timeout is not None else 0.0
