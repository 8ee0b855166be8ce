"""Gradients that are copied beside backward arrive whole, in order, and before anything is done with them."""

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.toy_task import ToyTask, toy_task
from worker_agent.training.gradients import ShardGradients
from worker_agent.training.host_copies import AtOnce, BesideBackward, HostCopies, copies_from
from worker_agent.training.layout import BucketSpec
from worker_agent.training.partial_sums import Vector


class LateStream:
    """A stream on the CPU that has copied nothing before it has to, or is so many places behind."""

    def __init__(self, behind: int) -> None:
        self._behind = behind
        self._queue: deque[Callable[[], None]] = deque()
        self.marks: list[LateEvent] = []
        self.num_buffers = 0

    def new_buffer(self, num_elements: int) -> Tensor:
        self.num_buffers += 1
        return torch.full((num_elements,), torch.nan)

    def copy(self, gradient: Tensor, buffer: Tensor) -> None:
        self._queue.append(lambda: self._copy(gradient, buffer))

    def mark(self) -> "LateEvent":
        self.marks.append(LateEvent(self))
        self._queue.append(self.marks[-1].pass_by)
        if len(self.marks) > self._behind:
            self.run_to(self.marks[-1 - self._behind])
        return self.marks[-1]

    def run_to(self, event: "LateEvent") -> None:
        while not event.query():
            self._queue.popleft()()

    @staticmethod
    def _copy(gradient: Tensor, buffer: Tensor) -> None:
        buffer.view(gradient.shape).copy_(gradient)


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self._passed = False

    def pass_by(self) -> None:
        self._passed = True

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        self._stream.run_to(self)


def loss_of(task: ToyTask, *indices: int) -> Tensor:
    return task.loss(task.batch(indices, "train")).loss_sum


def shard(copies: HostCopies | None, is_checked: bool = False) -> list[tuple[str, list[bytes | None]]]:
    """What is sent of one shard of three micro-batches."""
    task, sent = toy_task(buckets=2), list[tuple[str, list[bytes | None]]]()

    def send(spec: BucketSpec, parts: list[Vector | None]) -> None:
        sent.append((str(spec.bucket), [None if part is None else part.tobytes() for part in parts]))

    gradients = ShardGradients(task.trainable(), task.buckets, copies)
    for _ in range(2):
        sent.clear()
        collected = gradients.begin(0, 3, 3, send)
        for microbatch in range(3):
            loss = loss_of(task, 2 * microbatch, 2 * microbatch + 1)
            if is_checked:
                assert gradients.backward_checked(loss) == ""
            else:
                gradients.backward(loss, last=microbatch == 2)
        gradients.finish()
        gradients.release(collected)
    gradients.close()
    return sent


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("behind", [0, 1, 2, 1000])
def test_what_is_sent_does_not_depend_on_how_late_copies_are(behind: int, is_checked: bool) -> None:
    stream = LateStream(behind)
    assert shard(BesideBackward(stream), is_checked) == shard(None, is_checked)
    task = toy_task(buckets=2)
    assert stream.num_buffers == len(task.trainable()), "buffers are used again"


def test_a_bucket_is_sent_once_its_copies_are_there_and_not_before() -> None:
    task, order = toy_task(buckets=2), list[str]()
    stream = LateStream(behind=1000)
    gradients = ShardGradients(task.trainable(), task.buckets, BesideBackward(stream))
    first_layer = task.model.get_submodule("0")
    first_layer.register_full_backward_hook(lambda *_: order.append("first layer"))
    gradients.begin(0, 1, 1, lambda spec, parts: order.append(str(spec.bucket)))
    x, y, targets = task.batch([0, 1], "train")
    gradients.backward(task.loss((x.requires_grad_(), y, targets)).loss_sum, last=True)
    assert order == ["first layer", "lm_head", "flat"]


def test_a_stream_that_keeps_up_has_buckets_leave_while_backward_runs() -> None:
    task, order = toy_task(buckets=2), list[str]()
    gradients = ShardGradients(task.trainable(), task.buckets, BesideBackward(LateStream(behind=0)))
    first_layer = task.model.get_submodule("0")
    first_layer.register_full_backward_hook(lambda *_: order.append("first layer"))
    gradients.begin(0, 1, 1, lambda spec, parts: order.append(str(spec.bucket)))
    x, y, targets = task.batch([0, 1], "train")
    gradients.backward(task.loss((x.requires_grad_(), y, targets)).loss_sum, last=True)
    assert order[0] == "lm_head"


def test_parameters_without_a_gradient_are_zeros_beside_others_that_are_late() -> None:
    task, sent = toy_task(buckets=2), dict[str, Vector]()

    def send(spec: BucketSpec, parts: list[Vector | None]) -> None:
        assert parts[0] is not None
        sent[str(spec.bucket)] = parts[0].copy()

    gradients = ShardGradients(task.trainable(), task.buckets, BesideBackward(LateStream(behind=1000)))
    gradients.begin(0, 1, 1, send)
    last_layer = task.model.get_submodule("3")
    gradients.backward(last_layer(torch.ones(1, task.options.width)).sum(), last=True)
    assert not sent["flat"].any()
    assert sent["lm_head"].all()


def test_copies_of_a_shard_that_was_given_up_are_forgotten() -> None:
    stream, acted, out = LateStream(behind=1000), list[str](), np.zeros(4, np.float32)
    copies = BesideBackward(stream)
    copies.copy(torch.ones(4), out)
    copies.then(lambda: acted.append("given up"))
    copies.copy(torch.ones(4), out)
    copies.drop()
    copies.drop()
    assert not acted
    assert not out.any()
    copies.copy(torch.full((4,), 2.0), out)
    copies.then(lambda: acted.append("done"))
    copies.finish()
    assert acted == ["done"]
    assert out.tolist() == [2.0] * 4
    assert stream.num_buffers == 2


def test_memory_of_the_host_is_copied_at_once() -> None:
    assert isinstance(copies_from(torch.device("cpu")), AtOnce)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_stream_copies_what_was_computed(dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies, outs, acted = copies_from(device), [np.zeros(1 << 20, np.float32) for _ in range(8)], list[int]()
    expected = []
    for number, out in enumerate(outs):
        gradient = torch.randn(1 << 10, 1 << 10, device=device, dtype=dtype) @ torch.eye(
            1 << 10, device=device, dtype=dtype
        )
        expected.append(gradient.float().cpu().numpy().reshape(-1))
        copies.copy(gradient, out)
        del gradient
        copies.then(lambda number=number: acted.append(number))  # type: ignore[misc]
    copies.finish()
    assert acted == list(range(8))
    assert all(out.tobytes() == one.tobytes() for out, one in zip(outs, expected, strict=True))
