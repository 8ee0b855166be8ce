"""A run that a program of one's own takes part in.  [shell]

    run = join(model)                   # where and as whom: AYNI_COORDINATOR, AYNI_TOKEN_FILE, as for the agent
    data = run.shard(data)              # this worker's part
    optimizer = run.attach(optimizer)   # step() updates with the mean over all workers
    ... the loop as it was ...
    run.close()

Each process that joins is a worker; the program decides what it computes from which data. `join` waits until the run
has the workers that it starts with, and gives all of them the trainable parameters of rank 0.
"""

import atexit
import os
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from ayni.flags import read_environment
from ayni.kernels import loading
from ayni.process import load_token
from ayni.settings import SettingsError
from ayni.step_values import Commit
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.config import WorkerConfig
from worker_agent.integrations.averaging import CONTINUE, Averaging
from worker_agent.integrations.buckets import BUCKET_ELEMENTS, cut
from worker_agent.integrations.model_vectors import ModelVectors, check_floats
from worker_agent.integrations.sharding import shard
from worker_agent.training.fingerprint import parameters_sha256, task_fingerprint

_LOST_ADVICE = (
    "a program with data of its own can't come back to a run that has begun: start all of the run's programs again, "
    "and the coordinator with another run_id or with --fresh"
)


class JoinedRun:
    """One worker's part in a run, with data of its own. Thread-safe only where it says so."""

    def __init__(self, client: WorkerClient, averaging: Averaging, vectors: ModelVectors) -> None:
        """For `join`."""
        self._client = client
        self._averaging = averaging
        self.vectors = vectors
        """The exchange of the model's gradients, for those who feed it one by one."""
        self.weight = 1
        """What this worker's gradients are means over: samples or tokens; read when a step begins. 1 weighs all workers
        alike, as DistributedDataParallel does."""
        self._place = averaging.place()
        self._averaged = False
        """Whether `.grad` is the mean already, and nothing was added since."""
        self._hooks: list[RemovableHandle] = []
        self._error: BaseException | None = None
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        """This worker's number among those that the run started with, 0 for the first."""
        return self._place.rank

    @property
    def world_size(self) -> int:
        """Workers that the run started with."""
        return self._place.world_size

    @property
    def is_first(self) -> bool:
        """Whether this worker is rank 0, the one to save and to print where one should."""
        return self.rank == 0

    @property
    def live_workers(self) -> int:
        """Workers that took part in the last step."""
        return self._client.total_workers

    def shard(self, dataset: Any) -> Any:
        """Returns this worker's part of a data set; see `worker_agent.integrations.sharding`."""
        return shard(dataset, self.rank, self.world_size)

    def average_gradients(self, weight: int | None = None) -> Commit:
        """Makes each `.grad` the mean over all workers, weighted.

        With an optimizer attached, the next `step()` does not do it again: so that gradients can be clipped in between.

        Args:
            weight: what this worker's gradients are means over; None for `run.weight`.

        Raises:
            RunEnded: the run makes no more steps.
            PeerLost: a worker was lost, and the run was joined with on_loss="raise".
            AyniError: the coordinator refused; nothing was changed.
        """
        commit = self.vectors.average_gradients(self.weight if weight is None else weight)
        self._averaged = True
        return commit

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Has `optimizer.step()` average the gradients first; returns the same optimizer.

        Raises:
            ValueError: it calls its closure as often as this worker's own loss tells it to, or updates parameters
                that this run does not exchange.
        """
        known = {id(parameter) for parameter in self.vectors.parameters}
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if strange := [tuple(one.shape) for one in given if one.requires_grad and id(one) not in known]:
            raise ValueError(
                f"the optimizer updates {len(strange)} parameters that are not exchanged, the first of shape "
                f"{strange[0]}: join with the model as it is trained, after adapters are added and layers unfrozen"
            )
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS evaluates the loss as often as each worker's own data tell it to, so workers would wait for one "
                "another in vain: use an optimizer that makes one update for one gradient"
            )
        optimizer.register_step_pre_hook(self._before_step)
        if not self._hooks:
            self._hooks = [one.register_post_accumulate_grad_hook(self._note_new) for one in self.vectors.parameters]
        return optimizer

    def close(self) -> None:
        """Leaves the run; the others go on without this worker. A second call does nothing."""
        atexit.unregister(self.close)
        while self._hooks:
            self._hooks.pop().remove()
        self._client.close("done" if self._error is None else f"failed: {self._error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._error = error
        self.close()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Averages, or where a closure is to make the gradients first, has the closure do so."""
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            self._average_once()
            return None

        def averaged() -> Any:
            loss = closure()
            self._average_once()
            return loss

        return (args[0], averaged), {name: value for name, value in kwargs.items() if name != "closure"}

    def _average_once(self) -> None:
        if not self._averaged:
            self.average_gradients()
        self._averaged = False

    def _note_new(self, _: Tensor) -> None:
        self._averaged = False


def join(
    model: nn.Module,
    *,
    share_weights: bool = True,
    on_loss: str = CONTINUE,
    bucket_elements: int = BUCKET_ELEMENTS,
    wait: timedelta = timedelta(hours=24),
    environ: Mapping[str, str] = os.environ,
) -> JoinedRun:
    """Makes this process a worker of a run that trains a model.

    Args:
        model: what is trained; what `requires_grad` now is exchanged.
        share_weights: give every worker the trainable parameters of rank 0 first, as the run's first step. Without it
            the coordinator compares the workers' parameters, and refuses where they differ.
        on_loss: when a worker is lost, "continue" with those who are left or "raise" `PeerLost` on all of them.
        bucket_elements: elements that leave together while backward still runs; the same on all workers.
        wait: longest wait for the other workers.
        environ: settings of the agent by their environment variables: AYNI_COORDINATOR, AYNI_TOKEN_FILE or AYNI_TOKEN,
            and where they are needed AYNI_NAME, AYNI_TLS_CA, AYNI_INSECURE and others (docs/run-file.md).

    Raises:
        SettingsError: a setting is missing or wrong.
        CoordinatorUnreachable: nothing answered in time.
        ValueError: a parameter, or the run's wire type, does not fit.
        AyniError: the coordinator refused, such as `Incompatible` where another worker has another model; or the
            others began without this one (`RunStarted`).
    """
    loading.choose()
    named = [(name, parameter) for name, parameter in _inner(model).named_parameters() if parameter.requires_grad]
    check_floats(named)
    specs = cut({name: parameter.numel() for name, parameter in named}, bucket_elements)
    backend = _backend(named[0][1])
    facts = {
        "task_fingerprint": task_fingerprint(f"own program, buckets of {bucket_elements}", named),
        "task_summary": f"{type(_inner(model)).__name__}: {sum(p.numel() for _, p in named):,} elements trained"[:256],
        "num_blocks": len(specs),
        "num_buckets": len(specs),
        "shard_timeout": wait,
        "parameters_sha256": "" if share_weights else parameters_sha256(named),
    }
    client = WorkerClient.connect(client_config(environ, **facts), gpu_count=int(backend != "cpu"), backend=backend)
    try:
        if share_weights and client.wire_type != "float32":
            raise ValueError(
                f"this run's wire_type is {client.wire_type}, so weights would be rounded on their way: join with "
                "share_weights=False, and begin with the same weights on all workers"
            )
        averaging = Averaging(client, specs, on_loss)
        run = JoinedRun(client, averaging, ModelVectors(named, specs, averaging))
        if share_weights:
            run.vectors.share_first()
    except BaseException as error:
        client.close(f"failed: {error}")
        raise
    return run


def client_config(environ: Mapping[str, str], **facts: Any) -> ClientConfig:
    """Returns how to join, from the agent's settings in the environment.

    Raises:
        SettingsError: a setting is missing or wrong.
    """
    if not environ.get("AYNI_COORDINATOR") and not environ.get("AYNI_CONFIG"):
        raise SettingsError("AYNI_COORDINATOR is not set: it says where the coordinator is, as host:port")
    given = read_environment(WorkerConfig, environ)
    return ClientConfig(
        coordinator=given.coordinator,
        token=load_token(given.token_file, environ),
        run_id=given.run_id,
        worker_name=given.name,
        tls=given.tls,
        insecure=given.insecure,
        connect_timeout=given.connect_timeout,
        exchange_timeout=given.exchange_timeout,
        gradients=given.gradients,
        lost_advice=_LOST_ADVICE,
        **facts,
    )


def _inner(model: nn.Module) -> nn.Module:
    """Returns the model inside of DistributedDataParallel, whose names are those of the others' plain models."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _backend(parameter: nn.Parameter) -> str:
    kind = parameter.device.type
    return kind if kind in ("cpu", "cuda") else "wgpu"
