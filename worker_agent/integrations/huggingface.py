"""Callback for transformers' Trainer: its gradients are averaged over the workers of a run.  [shell]

    run = join(model)
    trainer = Trainer(model, args, train_dataset=run.shard(data), callbacks=[AyniCallback(run)])

Each worker is a Trainer of one process. Gradients are averaged as soon as the last backward of a step has ended, so the
Trainer clips, logs and updates with the mean. A worker's weight is what its Trainer divides the summed loss by (tokens,
`num_items_in_batch`), or where that is not known the samples of its step. Loss scaling for float16 is refused, since
its factor may differ between workers; use bfloat16 or float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

try:
    from accelerate.state import GradientState
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(f"{error}: the callback for Trainer needs pip install 'ayni[train]'") from error

from worker_agent.integrations.joined_run import JoinedRun


class AyniCallback(TrainerCallback):
    """Makes a Trainer a worker of a run."""

    def __init__(self, run: JoinedRun, *, all_save: bool = False, leave_at_end: bool = True) -> None:
        """Takes part in a run that was joined with the Trainer's model.

        Args:
            run: what `join` returned.
            all_save: write checkpoints on all workers, not only on rank 0.
            leave_at_end: leave the run when training ends; the others go on.
        """
        self._run, self._all_save, self._leave_at_end = run, all_save, leave_at_end
        self._hook: RemovableHandle | None = None
        self._weight = 0
        self._is_queued = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Watches the model."""
        if args.world_size > 1:
            raise ValueError(
                f"this Trainer has {args.world_size} processes of its own; each worker of a run is one process: start "
                "it with python, not with several processes of torchrun or accelerate"
            )
        if args.fp16:
            raise ValueError("fp16=True scales the loss by a factor that may differ between workers; use bf16=True")
        model: nn.Module = kwargs["model"]
        self._hook = model.register_forward_hook(self._after_forward, with_kwargs=True)
        self._weight, self._is_queued = 0, False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leaves saving to rank 0."""
        self._spare_saving(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves saving to rank 0."""
        self._spare_saving(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Lets go of the model, and leaves the run."""
        if self._hook is not None:
            self._hook.remove()
        if self._leave_at_end:
            self._run.close()

    def _spare_saving(self, control: TrainerControl) -> None:
        if not self._all_save and not self._run.is_first:
            control.should_save = False

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Counts what was computed, and has what is to come after its backward told."""
        if not (module.training and torch.is_grad_enabled()):
            return
        tokens = kwargs.get("num_items_in_batch")
        if tokens is not None:
            self._weight = int(tokens)
        else:
            self._weight += _num_samples([*args, *kwargs.values()])
        for tensor in _tensors(output):
            if tensor.requires_grad:
                # Of all hooks only one on what the whole model gives is sure to be called by the outermost backward.
                tensor.register_hook(self._in_backward)

    def _in_backward(self, _: Tensor) -> None:
        if not self._is_queued and GradientState().sync_gradients:
            self._is_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        weight, self._weight, self._is_queued = self._weight, 0, False
        self._run.average_gradients(weight=max(1, weight))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, Sequence) and not isinstance(output, str):
        for value in output:
            yield from _tensors(value)


def _num_samples(inputs: Sequence[Any]) -> int:
    return next((len(value) for value in inputs if isinstance(value, Tensor) and value.dim()), 1)
