"""Gradients of a shard, bucket by bucket, while backward is still running.  [shell]

Legend: N elements in a bucket.

A hook on every trainable parameter copies its gradient, as soon as autograd has it, to the parameter's place in its
bucket's host buffer, and takes it off the parameter: every micro-batch's gradient is computed for itself. When a
bucket has all of its gradients, the buffer is added along the canonical tree (`PartialSums`); in the shard's last
micro-batch the bucket's parts are handed to `send` at that moment. A parameter that gets no gradient counts as zeros.

Hooks run on the thread that runs backward, one at a time, because a task lives on one device. One copy per gradient:
device to host.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from worker_agent.training.layout import BucketSpec
from worker_agent.training.partial_sums import PartialSums, Vector

Send = Callable[[BucketSpec, list[Vector | None]], None]
"""Takes a bucket's parts, one for each node of the shard's cover. They stay valid until the next `begin`."""


class ShardGradients:
    """Collects the gradients of one shard after another."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], specs: Sequence[BucketSpec]) -> None:
        """Registers the hooks; `close` removes them."""
        named = dict(parameters)
        self._buckets = [_Bucket(spec, {name: named[name] for name in spec.names}) for spec in specs]
        self._hooks = [hook for bucket in self._buckets for hook in bucket.register(self._bucket_ready)]
        self._send: Send | None = None
        self._last = False

    def begin(self, start: int, stop: int, num_microbatches: int, send: Send) -> None:
        """Opens the shard of micro-batches [start, stop); `send` must be done with the parts of the shard before."""
        self._send, self._last = send, False
        for bucket in self._buckets:
            bucket.begin(start, stop, num_microbatches)

    def backward(self, loss_sum: Tensor, *, last: bool) -> None:
        """Runs backward for the next micro-batch; in the shard's last one, buckets are sent as they become complete."""
        self._last = last
        for bucket in self._buckets:
            bucket.expect_gradients()
        loss_sum.backward()
        for bucket in self._buckets:
            if bucket.is_waiting:
                bucket.fill_with_zeros()
                self._bucket_ready(bucket)

    def skip(self) -> None:
        """Says that the next micro-batch has weight 0 and no gradient."""
        for bucket in self._buckets:
            bucket.sums.push_absent()

    def finish(self) -> None:
        """Sends every bucket that has not been sent: all of them when the shard is empty or ends with weight 0."""
        for bucket in self._buckets:
            if not bucket.is_sent:
                self._hand_over(bucket)

    def resend(self, send: Send) -> None:
        """Sends all buckets of the shard that was collected last once more."""
        for bucket in self._buckets:
            send(bucket.spec, bucket.sums.parts())

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _bucket_ready(self, bucket: "_Bucket") -> None:
        bucket.sums.push()
        if self._last:
            self._hand_over(bucket)

    def _hand_over(self, bucket: "_Bucket") -> None:
        assert self._send is not None, "begin() has not been called"
        bucket.is_sent = True
        self._send(bucket.spec, bucket.sums.parts())


class _Bucket:
    """One bucket's parameters and sums."""

    def __init__(self, spec: BucketSpec, parameters: Mapping[str, nn.Parameter]) -> None:
        self.spec = spec
        self.sums = PartialSums(spec.num_elements)
        self.is_sent = False
        self._parameters = parameters
        self._slices = dict(spec.slices())
        self._missing: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether a gradient of the current micro-batch has not come."""
        return bool(self._missing)

    def register(self, ready: Callable[["_Bucket"], None]) -> list[torch.utils.hooks.RemovableHandle]:
        """Hooks all parameters; `ready` is called when the last gradient of a micro-batch is in the buffer."""
        return [
            parameter.register_post_accumulate_grad_hook(self._hook(name, ready))
            for name, parameter in self._parameters.items()
        ]

    def begin(self, start: int, stop: int, num_microbatches: int) -> None:
        """Opens a shard and drops whatever an interrupted one left on the parameters."""
        self.sums.begin(start, stop, num_microbatches)
        self.is_sent = False
        for parameter in self._parameters.values():
            parameter.grad = None

    def expect_gradients(self) -> None:
        """Opens a micro-batch."""
        self._missing = set(self._parameters)

    def fill_with_zeros(self) -> None:
        """Gives parameters without a gradient zeros."""
        for name in self._missing:
            self.sums.leaf()[self._slices[name]] = 0.0
        self._missing.clear()

    def _hook(self, name: str, ready: Callable[["_Bucket"], None]) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            if name not in self._missing:
                raise RuntimeError(
                    f"parameter {name} got a gradient twice in one backward, or outside ShardGradients.backward; "
                    "re-entrant checkpointing does that: use use_reentrant=False"
                )
            _copy_gradient(parameter, self.sums.leaf()[self._slices[name]])
            self._missing.discard(name)
            if not self._missing:
                ready(self)

        return take


def _copy_gradient(parameter: Tensor, out: Vector) -> None:
    """Moves a parameter's gradient to host memory as float32, shape [elements of the parameter]."""
    assert parameter.grad is not None
    torch.from_numpy(out).view(parameter.shape).copy_(parameter.grad)
    parameter.grad = None
