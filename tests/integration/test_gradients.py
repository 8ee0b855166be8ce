"""Gradients of a shard: one per micro-batch, sent while backward is running."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ayni.buckets import FLAT, Bucket
from tests.support.toy_task import ToyTask, toy_task
from worker_agent.training.gradients import ShardGradients
from worker_agent.training.layout import BucketSpec
from worker_agent.training.partial_sums import Vector

Sent = list[tuple[Bucket, list[Vector | None]]]


def collector(task: ToyTask) -> ShardGradients:
    return ShardGradients(task.trainable(), task.buckets)


def loss_of(task: ToyTask, *indices: int) -> Tensor:
    return task.loss(task.batch(indices, "train")).loss_sum


def keep(sent: Sent, spec: BucketSpec, parts: list[Vector | None]) -> None:
    sent.append((spec.bucket, [None if part is None else part.copy() for part in parts]))


def autograd(task: ToyTask, *indices: int) -> Vector:
    gradients = torch.autograd.grad(loss_of(task, *indices), [parameter for _, parameter in task.trainable()])
    return torch.cat([gradient.reshape(-1) for gradient in gradients]).numpy()


def test_each_micro_batch_is_computed_for_itself_and_added_along_the_tree() -> None:
    task, sent = toy_task(), Sent()
    gradients = collector(task)
    gradients.begin(0, 3, 3, lambda spec, parts: keep(sent, spec, parts))
    for microbatch in range(3):
        gradients.backward(loss_of(task, 2 * microbatch, 2 * microbatch + 1), last=microbatch == 2)
    gradients.finish()
    one, two, three = autograd(task, 0, 1), autograd(task, 2, 3), autograd(task, 4, 5)
    ((bucket, parts),) = sent
    assert bucket == FLAT
    assert len(parts) == 1
    assert parts[0] is not None
    assert parts[0].tobytes() == ((one + two) + three).tobytes()
    assert all(parameter.grad is None for _, parameter in task.trainable())


def test_a_bucket_leaves_before_backward_has_reached_the_first_layer() -> None:
    task = toy_task(buckets=2)
    gradients, order = collector(task), list[str]()
    first_layer = task.model.get_submodule("0")
    first_layer.register_full_backward_hook(lambda *_: order.append("first layer"))
    gradients.begin(0, 1, 1, lambda spec, parts: order.append(str(spec.bucket)))
    x, y, targets = task.batch([0, 1], "train")
    gradients.backward(task.loss((x.requires_grad_(), y, targets)).loss_sum, last=True)
    assert order == ["lm_head", "flat", "first layer"] or order == ["lm_head", "first layer", "flat"]


def test_nothing_is_sent_before_the_last_micro_batch() -> None:
    task, sent = toy_task(), Sent()
    gradients = collector(task)
    gradients.begin(0, 2, 2, lambda spec, parts: keep(sent, spec, parts))
    gradients.backward(loss_of(task, 0), last=False)
    assert sent == []
    gradients.backward(loss_of(task, 1), last=True)
    assert len(sent) == 1


def test_a_parameter_without_gradient_counts_as_zeros() -> None:
    task, sent = toy_task(buckets=2), Sent()
    gradients = collector(task)
    gradients.begin(0, 1, 1, lambda spec, parts: keep(sent, spec, parts))
    hidden = torch.ones(1, task.options.width)
    last_layer = task.model.get_submodule("3")
    gradients.backward(last_layer(hidden).sum(), last=True)
    assert [str(bucket) for bucket, _ in sent] == ["lm_head", "flat"]
    assert sent[1][1][0] is not None
    assert not sent[1][1][0].any()
    assert sent[0][1][0] is not None
    assert sent[0][1][0].all()


def test_an_empty_shard_sends_every_bucket_without_parts() -> None:
    task, sent = toy_task(buckets=2), Sent()
    gradients = collector(task)
    gradients.begin(4, 4, 8, lambda spec, parts: keep(sent, spec, parts))
    gradients.finish()
    assert [(str(bucket), parts) for bucket, parts in sent] == [("lm_head", []), ("flat", [])]


def test_a_last_micro_batch_of_weight_zero_still_sends() -> None:
    task, sent = toy_task(), Sent()
    gradients = collector(task)
    gradients.begin(2, 4, 4, lambda spec, parts: keep(sent, spec, parts))
    gradients.backward(loss_of(task, 0), last=False)
    gradients.skip()
    gradients.finish()
    assert sent[0][1][0] is not None
    assert sent[0][1][0].tobytes() == autograd(task, 0).tobytes()


def test_an_interrupted_shard_leaves_no_trace_in_the_next() -> None:
    task, sent = toy_task(buckets=2), Sent()
    gradients = collector(task)

    def refuse(spec: BucketSpec, parts: list[Vector | None]) -> None:
        raise ConnectionError("gone")

    gradients.begin(0, 2, 2, refuse)
    gradients.backward(loss_of(task, 0), last=False)
    with pytest.raises(ConnectionError, match=r"gone"):
        gradients.backward(loss_of(task, 1), last=True)
    gradients.begin(0, 1, 1, lambda spec, parts: keep(sent, spec, parts))
    gradients.backward(loss_of(task, 2), last=True)
    gradients.finish()
    flat = np.concatenate([part for _, parts in reversed(sent) for part in parts if part is not None])
    assert flat.tobytes() == autograd(task, 2).tobytes()


def test_the_same_parts_can_be_sent_again() -> None:
    task, first, second = toy_task(buckets=2), Sent(), Sent()
    gradients = collector(task)
    shard = gradients.begin(0, 2, 3, lambda spec, parts: keep(first, spec, parts))
    for microbatch in range(2):
        gradients.backward(loss_of(task, microbatch), last=microbatch == 1)
    shard.send(lambda spec, parts: keep(second, spec, parts))
    assert repr(first) == repr(second)
    assert len(first) == 2


def test_a_backward_outside_is_refused_and_close_takes_the_hooks_off() -> None:
    task = toy_task()
    gradients = collector(task)
    gradients.begin(0, 1, 1, lambda spec, parts: None)
    with pytest.raises(RuntimeError, match=r"outside ShardGradients.backward"):
        loss_of(task, 0).backward()
    gradients.close()
    loss_of(task, 0).backward()
    assert all(parameter.grad is not None for _, parameter in task.trainable())


def test_bfloat16_gradients_arrive_as_float32() -> None:
    task, sent = toy_task(dtype="bfloat16"), Sent()
    gradients = collector(task)
    gradients.begin(0, 1, 1, lambda spec, parts: keep(sent, spec, parts))
    gradients.backward(loss_of(task, 0), last=True)
    values = sent[0][1][0]
    assert values is not None
    assert values.dtype == np.float32
    assert values.any()


def test_shards_that_are_not_released_keep_their_values() -> None:
    """What was sent may have to be sent again while another shard is collected."""
    task = toy_task(buckets=2)
    gradients = collector(task)
    first, again, other = Sent(), Sent(), Sent()
    one = gradients.begin(0, 3, 8, lambda spec, parts: keep(first, spec, parts))
    for microbatch in range(3):
        gradients.backward(loss_of(task, microbatch), last=microbatch == 2)
    two = gradients.begin(3, 5, 8, lambda spec, parts: keep(other, spec, parts))
    for microbatch in range(2):
        gradients.backward(loss_of(task, 3 + microbatch), last=microbatch == 1)
    one.send(lambda spec, parts: keep(again, spec, parts))
    assert repr(first) == repr(again)
    assert repr(first) != repr(other)
    gradients.release(one)
    gradients.release(two)
    spare = list(gradients._spare)
    gradients.begin(0, 3, 8, lambda spec, parts: None)
    assert gradients._spare == spare[:-1]


@pytest.mark.parametrize(("element", "name"), [(0, "0.weight[0]"), (39, "0.weight[39]"), (41, "0.bias[1]")])
def test_a_checked_gradient_that_is_not_finite_is_not_added(element: int, name: str) -> None:
    task, sent = toy_task(), Sent()
    gradients = collector(task)
    gradients.begin(0, 3, 3, lambda spec, parts: keep(sent, spec, parts))
    assert gradients.backward_checked(loss_of(task, 0)) == ""
    parameter = dict(task.trainable())[name.partition("[")[0]]
    index = element if "weight" in name else element - 40
    spoil = parameter.register_hook(
        lambda grad: grad.reshape(-1).index_fill(0, torch.tensor([index]), torch.nan).view_as(grad)
    )
    assert gradients.backward_checked(loss_of(task, 1)) == f"flat, {name}: nan"
    spoil.remove()
    gradients.skip()
    assert gradients.backward_checked(loss_of(task, 2)) == ""
    assert sent == []
    gradients.finish()
    total = autograd(task, 0) + autograd(task, 2)
    assert sent[0][1][0] is not None
    assert sent[0][1][0].tobytes() == total.tobytes()


def test_vectors_from_elsewhere_stand_in_a_micro_batchs_place() -> None:
    task, sent = toy_task(buckets=2), Sent()
    gradients = collector(task)
    gradients.begin(2, 5, 8, lambda spec, parts: keep(sent, spec, parts))
    gradients.skip()
    for number, values in enumerate(gradients.leaves().values()):
        values[...] = number + 1
    gradients.push()
    gradients.skip()
    gradients.finish()
    assert [[None if part is None else float(part[0]) for part in parts] for _, parts in sent] == [
        [1.0, None],
        [2.0, None],
    ]
