"""Updates on the host and on the device agree with torch, and their states can be put back."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ayni.buckets import Bucket
from ayni.run_config import OptimizerConfig
from tests.support.toy_task import ToyTask, toy_task
from worker_agent.training.partial_sums import Vector
from worker_agent.training.update import Update, make_update

CONFIGS = [
    OptimizerConfig(weight_decay=0.05),
    OptimizerConfig(name="sgd"),
    OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.02),
]
STEPS = 20


def means_of(task: ToyTask, step: int) -> dict[Bucket, Vector]:
    rng = np.random.Generator(np.random.Philox(step))
    return {spec.bucket: rng.standard_normal(spec.num_elements, dtype=np.float32) for spec in task.buckets}


def updated(
    kind: str, config: OptimizerConfig, steps: Sequence[int], task: ToyTask | None = None
) -> tuple[ToyTask, Update]:
    task = task or toy_task(buckets=2)
    update = make_update(kind, config, task.trainable(), task.buckets)
    advance(task, update, steps)
    return task, update


def advance(task: ToyTask, update: Update, steps: Sequence[int]) -> None:
    for step in steps:
        update.step(means_of(task, step), learning_rate=0.01 / (step + 1), clip_factor=0.5 + step / 40)


def torch_by_hand(config: OptimizerConfig, steps: Sequence[int]) -> ToyTask:
    """Torch's optimizer, fed by hand."""
    task = toy_task(buckets=2)
    named = dict(task.trainable())
    if config.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            named.values(), lr=1.0, momentum=config.momentum, weight_decay=config.weight_decay
        )
    else:
        optimizer = torch.optim.AdamW(named.values(), lr=1.0, weight_decay=config.weight_decay)
    for step in steps:
        means = means_of(task, step)
        for spec in task.buckets:
            for name, place in spec.slices():
                gradient = torch.from_numpy(means[spec.bucket][place]).view(named[name].shape)
                named[name].grad = gradient * (0.5 + step / 40)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        optimizer.step()
    return task


def flat(task: ToyTask) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).float() for _, parameter in task.trainable()])


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}-{config.momentum}")
def test_twenty_updates_agree_with_torch_to_a_millionth(config: OptimizerConfig, kind: str) -> None:
    task, _ = updated(kind, config, range(STEPS))
    expected = flat(torch_by_hand(config, range(STEPS)))
    assert not torch.allclose(flat(task), flat(toy_task(buckets=2)), atol=1e-3)
    torch.testing.assert_close(flat(task), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["host", "device"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}-{config.momentum}")
def test_a_state_that_is_put_back_continues_the_same_run(config: OptimizerConfig, kind: str, dtype: str) -> None:
    task, update = updated(kind, config, range(5), toy_task(buckets=2, dtype=dtype))
    other = toy_task(seed=99, buckets=2, dtype=dtype)
    other.model.load_state_dict(task.model.state_dict())
    restored = make_update(kind, config, other.trainable(), other.buckets)
    restored.load_state(update.state())
    advance(task, update, range(5, 9))
    advance(other, restored, range(5, 9))
    assert torch.equal(flat(task), flat(other))
    assert update.parameters_sha256() == restored.parameters_sha256()


def test_a_bfloat16_model_is_trained_in_float32_on_the_host() -> None:
    """Changes far below bfloat16's resolution must add up."""
    task = toy_task(buckets=2, dtype="bfloat16")
    update = make_update("host", OptimizerConfig(name="sgd"), task.trainable(), task.buckets)
    before = flat(task)
    ones = {spec.bucket: np.ones(spec.num_elements, np.float32) for spec in task.buckets}
    for _ in range(64):
        update.step(ones, learning_rate=1e-3, clip_factor=1.0)
    torch.testing.assert_close(flat(task), before - 0.064, rtol=0.01, atol=1e-3)


def test_a_float32_model_on_the_cpu_is_updated_in_its_own_memory() -> None:
    task = toy_task()
    places = [parameter.data_ptr() for _, parameter in task.trainable()]
    updated("host", OptimizerConfig(), range(2), task)
    assert [parameter.data_ptr() for _, parameter in task.trainable()] == places


def test_states_pass_between_replicas_in_place_and_replicas_with_a_copy() -> None:
    """A float32 model on the CPU is its own copy, one on a GPU is not; a transposed one stands for it here."""
    task, update = updated("host", OptimizerConfig(), range(3), toy_task(buckets=2))
    other = toy_task(seed=99, buckets=2)
    for module in (module for module in other.model.modules() if isinstance(module, torch.nn.Linear)):
        module.weight = torch.nn.Parameter(module.weight.detach().t().contiguous().t())
    other.model.load_state_dict(task.model.state_dict())
    restored = make_update("host", OptimizerConfig(), other.trainable(), other.buckets)
    restored.load_state(update.state())
    assert restored.state().keys() == update.state().keys()
    advance(task, update, range(3, 6))
    advance(other, restored, range(3, 6))
    assert torch.equal(flat(task), flat(other))
    update.load_state(restored.state())
    assert update.parameters_sha256() == restored.parameters_sha256()


def test_hashes_differ_after_an_update_and_between_names() -> None:
    task, update = updated("host", OptimizerConfig(), range(1))
    before = update.parameters_sha256()
    advance(task, update, [1])
    assert update.parameters_sha256() != before


def test_a_state_of_another_optimizer_is_refused_by_name() -> None:
    task, update = updated("host", OptimizerConfig(name="sgd"), range(1))
    other = make_update("host", OptimizerConfig(), task.trainable(), task.buckets)
    with pytest.raises(ValueError, match="has no 'first_moment/"):
        other.load_state(update.state())


def test_an_unknown_kind_is_refused() -> None:
    task = toy_task()
    with pytest.raises(ValueError, match="update 'moon' is neither"):
        make_update("moon", OptimizerConfig(), task.trainable(), task.buckets)
