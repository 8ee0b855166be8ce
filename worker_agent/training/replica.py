"""One replica: the task's parameters, its optimizer, and how many updates they have had.  [shell]"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ayni.buckets import Bucket
from ayni.run_config import RunConfig
from ayni.step_values import Origin
from worker_agent.session import Commit, ShardAssignment, Vector
from worker_agent.training.checkpoint import CheckpointFolder, restore, state_of
from worker_agent.training.fingerprint import parameters_sha256
from worker_agent.training.layout import BucketSpec
from worker_agent.training.local_update import LocalUpdate
from worker_agent.training.task import Task
from worker_agent.training.update import Update, make_update

log = logging.getLogger(__name__)


class Replica:
    """What is trained."""

    def __init__(self, task: Task, config: RunConfig, specs: Sequence[BucketSpec]) -> None:
        """Takes the task as it is; the optimizer is made when the first lease says where updates run."""
        self.task = task
        self.update: Update | None = None
        self.completed_steps = 0
        self.origin: Origin | None = None
        """Where the last update came from; None where there was none, or nobody has said it."""
        self.defect = ""
        """Why the parameters are not those that the run has after so many steps; empty for none known."""
        self._config, self._specs = config, specs

    def parameters_sha256(self) -> str:
        """Returns the hash of the trainable parameters, for the coordinator to compare."""
        return self.update.parameters_sha256() if self.update else parameters_sha256(self.task.trainable())

    def prepare(self, kind: str) -> Update:
        """Returns the optimizer, which is made now if there is none; `kind` is "host" or "device".

        Raises:
            RuntimeError: it runs elsewhere already.
        """
        if self.update is None:
            self.update = self._make_update(kind)
        elif kind and kind != self.update.kind:
            raise RuntimeError(
                f"this worker's optimizer runs on the {self.update.kind}, as in the state that it goes on from, but "
                f"the run says {kind}; set optimizer.update to {self.update.kind}"
            )
        return self.update

    def apply(self, lease: ShardAssignment, commit: Commit, means: Mapping[Bucket, Vector]) -> bool:
        """Makes a committed step's update; returns whether it changed anything."""
        update = self.prepare(lease.update)
        self.completed_steps += 1
        self.origin = lease.origin
        if not commit.total_weight:
            log.warning("step %d changed nothing: its samples have no weight", commit.step)
            return False
        update.step(means, learning_rate=commit.learning_rate, clip_factor=commit.clip_factor)
        return True

    def load(self, checkpoint: Path, kind: str) -> None:
        """Continues from a checkpoint's state; see `Trainer.load`."""
        self.update = self._make_update(kind)
        self.completed_steps = CheckpointFolder(checkpoint.parent).load(checkpoint.name, self.task, self.update)
        self.origin = None

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns copies of everything that training goes on from (parameters, optimizer), and facts about it."""
        tensors, facts = state_of(self.task, self.update, self.completed_steps)
        return tensors, {**facts, **self._own_facts(), **_origin_facts(self.origin)}

    def restore(self, what: str, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
        """Goes on from what `state` of an equal replica returned; see `Trainer.restore`."""
        for name, own in self._own_facts().items():
            if facts.get(name, own) != own:
                raise ValueError(f"{what} was written with {name} {facts[name]}, but this run has {name} {own}")
        kind = facts.get("update", "")
        update = self._make_update(kind) if kind else None
        # An error from here on may leave a part of the old state and a part of the new one.
        before, self.defect = self.defect, f"{what} was taken in part"
        self.completed_steps = restore(what, tensors, facts, self.task, update)
        self.update, self.defect, self.origin = update, "", _origin_of(facts)
        if before:
            log.info("%s replaces parameters that could not be used: %s", what, before)

    def lag(self, step: int) -> str:
        """Returns in what the parameters differ from those at a step of the run; empty if in nothing."""
        if self.defect:
            return f"this worker's parameters are not the run's ({self.defect})"
        if self.completed_steps != step:
            return f"this worker's parameters have had {self.completed_steps} updates"
        return ""

    def discard(self, why: str) -> None:
        """Counts the parameters as having had no update, until there is another state."""
        self.completed_steps, self.origin, self.defect = 0, None, why

    def _make_update(self, kind: str) -> Update:
        named = self.task.trainable()
        if self._config.local_update.enabled:
            return LocalUpdate(kind, self._config, named, self._specs)
        return make_update(kind, self._config.optimizer, named, self._specs)

    def _own_facts(self) -> dict[str, str]:
        """Returns what must be the same where a run goes on, beside the task."""
        local = self._config.local_update
        return {
            "seed": str(self._config.seed),
            "optimizer": self._config.optimizer.name,
            "local_update": local.inner_state if local.enabled else "off",
        }


def _origin_facts(origin: Origin | None) -> dict[str, str]:
    return {"epoch": str(origin.epoch), "attempt": str(origin.attempt)} if origin else {}


def _origin_of(facts: Mapping[str, str]) -> Origin | None:
    epoch, attempt = facts.get("epoch", ""), facts.get("attempt", "")
    return Origin(epoch=int(epoch), attempt=int(attempt)) if epoch and attempt else None
