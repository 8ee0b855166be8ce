"""Gradients of shards, bucket by bucket, while backward is still running.  [shell]

Legend: N elements in a bucket.

A hook on every trainable parameter copies its gradient, as soon as autograd has it, to the parameter's place in its
bucket's host buffer, and takes it off the parameter: every micro-batch's gradient is computed for itself. When a
bucket has all of its gradients, the buffer is added along the canonical tree (`PartialSums`); in the shard's last
micro-batch the bucket's parts are handed to `send` at that moment. A parameter that gets no gradient counts as zeros.

`backward_checked` adds a micro-batch only after the whole of its backward, if all of it is finite. Then no bucket can
leave before the last backward has ended, and the overlap of backward and sending is lost.

One shard is collected at a time, but the sums of a shard stay valid until they are released: what was sent may have to
be sent again while other shards are collected. Buffers are kept for later shards, so that nothing is allocated once a
worker has done as many shards at a time as it ever does.

Hooks run on the thread that runs backward, one at a time, because a task lives on one device. One copy per gradient:
device to host; out of a CUDA device beside backward, through page-locked memory (`host_copies`), so that a bucket is
pushed and sent when its copies are there, from a later hook or at the end of backward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ayni.buckets import Bucket
from worker_agent.training.finite import first_problem, square_sum
from worker_agent.training.host_copies import HostCopies, copies_from
from worker_agent.training.layout import BucketSpec
from worker_agent.training.partial_sums import NewVector, PartialSums, Vector, new_ordinary_vector

Send = Callable[[BucketSpec, list[Vector | None]], None]
"""Takes a bucket's parts, one for each node of the shard's cover. They stay valid until the shard is released."""


@dataclass(frozen=True, slots=True)
class ShardSums:
    """What the micro-batches of one shard add up to: one entry for each bucket."""

    entries: tuple[tuple[BucketSpec, PartialSums], ...]
    corrected: set[Bucket] = field(default_factory=set, compare=False)
    """Buckets whose parts have been given what rounding kept back before."""

    def send(self, send: Send) -> None:
        """Hands over all buckets, once more."""
        for spec, sums in self.entries:
            send(spec, sums.parts())

    def square_sum(self) -> float:
        """Returns the sum of the squares of all parts."""
        return sum(square_sum(part) for _, sums in self.entries for part in sums.parts() if part is not None)


class ShardGradients:
    """Collects the gradients of one shard after another."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        specs: Sequence[BucketSpec],
        copies: HostCopies | None = None,
    ) -> None:
        """Registers the hooks; `close` removes them.

        Args:
            parameters: what is trained, with names.
            specs: which of them make up which bucket.
            copies: how gradients get to host memory; None: by the device that the parameters are on.
        """
        named = dict(parameters)
        self._copies = copies or copies_from(next((one.device for one in named.values()), torch.device("cpu")))
        self.new_vector: NewVector = new_ordinary_vector
        """Allocates buffers for parts; a session says how they are sent with the fewest copies."""
        self._buckets = [_Bucket(spec, {name: named[name] for name in spec.names}, self._new_vector) for spec in specs]
        self._hooks = [hook for bucket in self._buckets for hook in bucket.register(self._copies, self._bucket_copied)]
        self._spare: list[ShardSums] = []
        self._send: Send | None = None
        self._last = self._checked = False

    def begin(self, start: int, stop: int, num_microbatches: int, send: Send) -> ShardSums:
        """Opens the shard of micro-batches [start, stop) and returns its sums, which are the caller's to release."""
        self._copies.drop()
        self._send, self._last, self._checked = send, False, False
        shard = self._spare.pop() if self._spare else ShardSums(tuple(bucket.new_sums() for bucket in self._buckets))
        for bucket, (_, sums) in zip(self._buckets, shard.entries, strict=True):
            sums.begin(start, stop, num_microbatches)
            bucket.begin(sums)
        return shard

    def release(self, shard: ShardSums) -> None:
        """Takes the buffers of a shard back; whoever was sent its parts must be done with them."""
        for _, sums in shard.entries:
            sums.release()
        shard.corrected.clear()
        self._spare.append(shard)

    def backward(self, loss_sum: Tensor, *, last: bool) -> None:
        """Runs backward for the next micro-batch; in the shard's last one, buckets are sent as they become complete."""
        self._last, self._checked = last, False
        self._run_backward(loss_sum)

    def backward_checked(self, loss_sum: Tensor) -> str:
        """Runs backward for the next micro-batch and adds its gradient if all of it is finite.

        Returns:
            Where the first value is that is not finite; empty when the gradient was added. If it was not, the
            micro-batch is to be skipped (`skip`).
        """
        self._last, self._checked = False, True
        self._run_backward(loss_sum)
        for bucket in self._buckets:
            if problem := first_problem(bucket.leaf()):
                return f"{bucket.spec.bucket}, {bucket.name_at(problem.index)}: {problem.value}"
        for bucket in self._buckets:
            bucket.push()
        return ""

    def leaves(self) -> dict[Bucket, Vector]:
        """Returns the buffers of the next micro-batch, each shape [N], to be filled from elsewhere and pushed."""
        return {bucket.spec.bucket: bucket.leaf() for bucket in self._buckets}

    def push(self) -> None:
        """Adds what is in `leaves` as the next micro-batch."""
        for bucket in self._buckets:
            bucket.push()

    def skip(self) -> None:
        """Says that the next micro-batch has weight 0 and no gradient."""
        for bucket in self._buckets:
            bucket.push_absent()

    def finish(self) -> None:
        """Sends every bucket that has not been sent: all of them when the shard is empty or ends with weight 0."""
        for bucket in self._buckets:
            if not bucket.is_sent:
                self._hand_over(bucket)

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _new_vector(self, num_elements: int) -> Vector:
        return self.new_vector(num_elements)

    def _run_backward(self, loss_sum: Tensor) -> None:
        for bucket in self._buckets:
            bucket.expect_gradients()
        loss_sum.backward()
        self._copies.finish()
        for bucket in self._buckets:
            if bucket.is_waiting:
                bucket.fill_with_zeros()
                self._bucket_ready(bucket)

    def _bucket_copied(self, bucket: "_Bucket") -> None:
        """The last copy of a bucket's gradients was asked for."""
        self._copies.then(lambda: self._bucket_ready(bucket))

    def _bucket_ready(self, bucket: "_Bucket") -> None:
        if self._checked:
            return
        bucket.push()
        if self._last:
            self._hand_over(bucket)

    def _hand_over(self, bucket: "_Bucket") -> None:
        assert self._send is not None, "begin() has not been called"
        bucket.is_sent = True
        self._send(bucket.spec, bucket.parts())


class _Bucket:
    """One bucket's parameters, and the sums of the shard that is collected."""

    def __init__(self, spec: BucketSpec, parameters: Mapping[str, nn.Parameter], new_vector: NewVector) -> None:
        self.spec = spec
        self.is_sent = False
        self._free: list[Vector] = []
        self._new_vector = new_vector
        self._sums = PartialSums(spec.num_elements, self._free, new_vector)
        self._parameters = parameters
        self._slices = dict(spec.slices())
        self._missing: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether a gradient of the current micro-batch has not come."""
        return bool(self._missing)

    def new_sums(self) -> tuple[BucketSpec, PartialSums]:
        """Returns sums for one more shard; all of them share one free list."""
        return self.spec, PartialSums(self.spec.num_elements, self._free, self._new_vector)

    def register(
        self, copies: HostCopies, copied: Callable[["_Bucket"], None]
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """Hooks all parameters; `copied` is called when the last gradient of a micro-batch was given to `copies`."""
        return [
            parameter.register_post_accumulate_grad_hook(self._hook(name, copies, copied))
            for name, parameter in self._parameters.items()
        ]

    def begin(self, sums: PartialSums) -> None:
        """Opens a shard and drops whatever an interrupted one left on the parameters."""
        self._sums = sums
        self.is_sent = False
        self._missing.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def expect_gradients(self) -> None:
        """Opens a micro-batch."""
        self._missing = set(self._parameters)

    def fill_with_zeros(self) -> None:
        """Gives parameters without a gradient zeros."""
        for name in self._missing:
            self.leaf()[self._slices[name]] = 0.0
        self._missing.clear()

    def name_at(self, index: int) -> str:
        """Returns the parameter that an element belongs to, and which of its elements it is."""
        for name, place in self._slices.items():
            if place.start <= index < place.stop:
                return f"{name}[{index - place.start}]"
        raise AssertionError(f"{self.spec.bucket} has no element {index}")

    def leaf(self) -> Vector:
        """Returns the buffer of the current micro-batch, shape [N]."""
        return self._sums.leaf()

    def push(self) -> None:
        """Adds the current micro-batch."""
        self._sums.push()

    def push_absent(self) -> None:
        """Adds nothing for the current micro-batch."""
        self._sums.push_absent()

    def parts(self) -> list[Vector | None]:
        """Returns the shard's parts."""
        return self._sums.parts()

    def _hook(self, name: str, copies: HostCopies, copied: Callable[["_Bucket"], None]) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            if name not in self._missing:
                raise RuntimeError(
                    f"parameter {name} got a gradient twice in one backward, or outside ShardGradients.backward; "
                    "re-entrant checkpointing does that: use use_reentrant=False"
                )
            assert parameter.grad is not None
            copies.copy(parameter.grad, self.leaf()[self._slices[name]])
            parameter.grad = None
            self._missing.discard(name)
            if not self._missing:
                copied(self)

        return take
