"""Communication hook of DistributedDataParallel: gradients are averaged by the run's coordinator.  [shell]

    model = DistributedDataParallel(model)
    run = join(model)
    model.register_comm_hook(run, ddp_hook)

Each process of the script is a worker of the run, whatever process group it has besides; a group of one process is
enough. Gradients leave, bucket by bucket, while backward still runs. `backward()` returns when the step is committed,
and raises what the coordinator refused, as its own class.

Buckets of the exchange are cut by parameter names. They are not DistributedDataParallel's own, whose order each process
finds out for itself in its first backward.
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from worker_agent.integrations.joined_run import JoinedRun

BucketFuture = torch.futures.Future[Tensor]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One of DistributedDataParallel's buckets, with one copy on the host if it is on an accelerator."""

    future: BucketFuture
    buffer: Tensor
    host: Tensor
    """The buffer itself where that is on the host."""
    gradients: list[tuple[nn.Parameter, Tensor]]
    """Views of the host's copy, of each parameter's shape."""


@dataclass(slots=True)
class _Backward:
    """One backward that runs now: what DistributedDataParallel waits for."""

    buckets: list[_Bucket] = field(default_factory=list)
    maybe_unused: list[nn.Parameter] = field(default_factory=list)
    """Parameters whose gradients are all zeros here. One that took no part in this forward gets no `.grad` from
    DistributedDataParallel unless a process of its own group used it; another worker of the run may have."""
    error: Exception | None = None


_RUNNING: WeakKeyDictionary[JoinedRun, _Backward] = WeakKeyDictionary()


def ddp_hook(run: JoinedRun, bucket: GradBucket) -> BucketFuture:
    """Hands a bucket's gradients over; for `register_comm_hook`, with a `JoinedRun` as the state.

    Returns:
        A future of the bucket's means.
    """
    backward = _RUNNING.get(run)
    begins = backward is None
    if backward is None:
        backward = _RUNNING[run] = _Backward()
        # Runs when all gradients are there, before DistributedDataParallel takes the means. What is raised in there
        # keeps its class; what a hook raises, or a future holds, becomes a RuntimeError.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: _finish(run))
    taken = _on_host(bucket)
    backward.buckets.append(taken)
    try:
        if begins:
            run.vectors.begin(run.weight)
        if backward.error is None:
            for parameter, gradient in taken.gradients:
                run.vectors.add(parameter, gradient)
    except Exception as error:
        backward.error = error
    backward.maybe_unused.extend(parameter for parameter, gradient in taken.gradients if not gradient.any())
    return taken.future


def _on_host(bucket: GradBucket) -> _Bucket:
    buffer = bucket.buffer().detach()
    if buffer.is_sparse:
        raise ValueError("sparse gradients can't be averaged over a run: make the embedding dense (sparse=False)")
    host = buffer.to("cpu")
    first = buffer.storage_offset()
    pairs: Any = zip(bucket.parameters(), bucket.gradients(), strict=True)
    views = [
        (parameter, host.as_strided(gradient.size(), gradient.stride(), host.storage_offset() + start))
        for parameter, gradient in pairs
        for start in [gradient.storage_offset() - first]
    ]
    devices: Any = [buffer.device] if buffer.is_cuda else None
    return _Bucket(torch.futures.Future(devices=devices), buffer, host, views)


@torch.no_grad()
def _finish(run: JoinedRun) -> None:
    backward = _RUNNING.pop(run)
    try:
        if backward.error:
            raise backward.error
        run.vectors.finish()
    except BaseException as error:
        run.vectors.give_up()
        for bucket in backward.buckets:
            bucket.future.set_exception(error)  # type: ignore[arg-type]
        raise
    for bucket in backward.buckets:
        for parameter, gradient in bucket.gradients:
            gradient.copy_(run.vectors.mean(parameter))
        if bucket.host is not bucket.buffer:
            bucket.buffer.copy_(bucket.host)
        bucket.future.set_result(bucket.buffer)
    if used_elsewhere := [parameter for parameter in backward.maybe_unused if run.vectors.mean(parameter).any()]:
        # After DistributedDataParallel has taken the means.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: run.vectors.write_gradients(used_elsewhere))
