"""What a run is: the run file's values, validated as a whole.  [core]

The coordinator reads them from YAML and sends them to every worker (GetRun), so both sides have the same values and a
worker needs no file. `ayni.settings` builds these classes from mappings and refuses unknown keys.
"""

import re
from dataclasses import dataclass, field

from ayni.tensors import WIRE_DTYPES

LARGEST_SAMPLES = 1 << 31
LARGEST_MICROBATCHES = 1 << 16
LARGEST_STEPS = 1 << 31
"""Bounds that keep every sample position and count well inside 64 bits."""

TOPOLOGIES = ("star", "sharded", "torch", "auto")
"""Who may reduce gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """What is trained."""

    name: str = ""
    """Task in tree ("lora_classification", "causal_lm", "causal_lm_lora") or your own as "module:Class" on the workers'
    Python path. Empty: the workers bring their own training loop and use WorkerClient."""
    options: dict[str, object] = field(default_factory=dict)
    """Options of the task; the task refuses unknown ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How a step's samples are cut."""

    samples: int = 32
    """Samples of one step over all workers: the global batch."""
    microbatches: int = 0
    """Micro-batches that the global batch is cut into: the unit of lease and reduction. 0: one for each worker."""
    evaluation_samples: int = 64
    """Samples of one evaluation micro-batch."""

    def __post_init__(self) -> None:
        """Checks the counts."""
        _between("batch.samples", self.samples, 1, LARGEST_SAMPLES)
        _between("batch.microbatches", self.microbatches, 0, LARGEST_MICROBATCHES)
        _between("batch.evaluation_samples", self.evaluation_samples, 1, LARGEST_SAMPLES)
        if self.microbatches > self.samples:
            raise ValueError(f"batch.microbatches ({self.microbatches}) is more than batch.samples ({self.samples})")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """How parameters are updated."""

    name: str = "adamw"
    """"adamw" or "sgd"."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int = 0
    """Steps of linear warm-up; the first step has 1 / warmup_steps of the peak."""
    final_learning_rate: float = 0.0
    """Learning rate that the cosine reaches one step after the run's last."""
    schedule: str = "cosine"
    """"cosine" or "constant", after the warm-up."""
    weight_decay: float = 0.0
    """Decoupled for adamw, added to the gradient for sgd; as in torch."""
    beta1: float = 0.9
    """AdamW's first moment."""
    beta2: float = 0.999
    """AdamW's second moment."""
    epsilon: float = 1e-8
    """AdamW's denominator."""
    momentum: float = 0.0
    """SGD's momentum."""
    clip_norm: float = 1.0
    """Largest norm of the mean gradient; 0 switches clipping off."""
    update: str = "auto"
    """"host": float32 on the CPU, the same bytes on every processor. "device": torch on the backend. "auto": host when
    the first epoch has more than one kind of device, or wgpu, which may stand for several; else device."""

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        _one_of("optimizer.name", self.name, ("adamw", "sgd"))
        _one_of("optimizer.schedule", self.schedule, ("cosine", "constant"))
        _one_of("optimizer.update", self.update, ("auto", "host", "device"))
        _at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        for name in ("learning_rate", "final_learning_rate", "weight_decay", "momentum", "clip_norm"):
            _at_least(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; it must be in [0, 1)")
        if not self.epsilon > 0:
            raise ValueError(f"optimizer.epsilon is {self.epsilon}; it must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """When the held-out data is evaluated."""

    every_steps: int = 0
    """Steps between evaluations. 0: only after the last step."""
    metric: str = "loss"
    """What "best" means: "loss" (lowest) or "accuracy" (highest)."""

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        _at_least("evaluation.every_steps", self.every_steps, 0)
        _one_of("evaluation.metric", self.metric, ("loss", "accuracy"))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateStoreConfig:
    """Where the run's train state is stored as objects. Credentials are each worker's own."""

    kind: str = "file"
    """"file": a folder below each worker's blocks.root, shared by all of them. "s3", "gcs", "azure": a service."""
    bucket: str = "checkpoints"
    """Bucket; with "file" the folder."""
    prefix: str = ""
    """Text that every key begins with."""
    endpoint: str = ""
    """Address of the service as a URL. Empty: the provider's own."""
    region: str = ""
    """Region of the service. Empty: the provider's default."""
    path_style: bool = False
    """Put the bucket into the path and not into the host name."""

    def __post_init__(self) -> None:
        """Checks the kind."""
        _one_of("state.store.kind", self.kind, ("file", "s3", "gcs", "azure"))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateConfig:
    """The train state (parameters, optimizer moments, step) as blocks that other workers can get."""

    publish_every: int = 0
    """Steps after which every worker copies its state into its host tier, where others can read it. 0: only where a
    worker that joins late needs it."""
    store_every: int = 0
    """Steps after which the published state is also stored as objects, divided among the workers; a multiple of
    publish_every. 0: never."""
    resume_step: int = 0
    """Steps that a stored state has behind it, from which this run goes on; the number of workers may be another one.
    0: a fresh start."""
    resume_run_id: str = ""
    """Run that stored the state. Empty: this one."""
    keep: int = 0
    """Stored states to keep, the newest ones; older ones are removed after each new one. 0: all."""
    block_bytes: int = 1 << 20
    """Size of one block of the state."""
    store: StateStoreConfig = field(default_factory=StateStoreConfig)
    """Where the state is stored."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name in ("publish_every", "store_every", "resume_step"):
            _between(f"state.{name}", getattr(self, name), 0, LARGEST_STEPS)
        _at_least("state.keep", self.keep, 0)
        _between("state.block_bytes", self.block_bytes, 1 << 12, 1 << 26)
        if self.store_every and (not self.publish_every or self.store_every % self.publish_every):
            raise ValueError(
                f"state.store_every ({self.store_every}) must be a multiple of state.publish_every "
                f"({self.publish_every}): what is stored is what was published"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalUpdateConfig:
    """Local updates (DiLoCo): a worker makes one inner step for each micro-batch of its lease, by itself.

    What is reduced is how far each worker's parameters went, weighted by samples or tokens; one outer step with
    Nesterov momentum follows. A worker's inner steps are as many as its share of `batch.microbatches`, so they follow
    its speed.
    """

    enabled: bool = False
    """Train with local updates. The optimizer section is the inner optimizer then."""
    outer_learning_rate: float = 0.7
    """Learning rate of the outer step."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer step; 0 for plain descent."""
    inner_state: str = "keep"
    """What becomes of the inner optimizer's moments after an outer step: "keep" (each worker its own) or "reset" (then
    a worker that comes back makes the same next step as one that never left)."""

    def __post_init__(self) -> None:
        """Checks names and ranges."""
        _one_of("local_update.inner_state", self.inner_state, ("keep", "reset"))
        if not self.outer_learning_rate > 0:
            raise ValueError(f"local_update.outer_learning_rate is {self.outer_learning_rate}; it must be above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"local_update.outer_momentum is {self.outer_momentum}; it must be in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run."""

    run_id: str = "run"
    """Name of the run: letters, digits, dot, dash, underscore."""
    seed: int = 0
    """Fixes sample order, initial weights, dropout and every other random draw."""
    num_steps: int = 0
    """Optimizer steps. 0: until the coordinator is stopped."""
    min_workers: int = 1
    """Workers without which the run pauses."""
    start_workers: int = 0
    """Workers that the run waits for before its first step. 0: min_workers."""
    max_workers: int = 64
    """Workers that may be members at one time."""
    precision: str = "float32"
    """Arithmetic of forward and backward: "float32", or "bfloat16" for autocast. Every worker's device must have it."""
    wire_type: str = "float32"
    """Element type of gradients on the wire: "float32" (exact), "bfloat16", "float16", or "int8": one byte and a scale
    for every 256 elements out, with what rounding keeps back sent in the next step, and the mean in bfloat16."""
    topology: str = "star"
    """Who reduces gradients: "star" the coordinator; "sharded" the workers, each its slice of every bucket, with the
    same bytes; "torch" a torch.distributed process group, where the bytes depend on who computed what; "auto" star or
    sharded, whichever the measured links promise to be faster."""
    audit_every: int = 1
    """Steps between comparisons of all workers' parameter hashes. 0: only before the first step."""
    non_finite: str = "halt"
    """What to do about a loss or gradient that is not finite: "halt" the run, "skip" the micro-batch, or "quarantine":
    skip it, and shut a worker out after `quarantine_after` of them."""
    quarantine_after: int = 3
    """Micro-batches that are not finite after which a worker is shut out of the run, with "quarantine"."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """What is trained."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """How a step's samples are cut."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How parameters are updated."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """When the held-out data is evaluated."""
    state: StateConfig = field(default_factory=StateConfig)
    """The train state as blocks."""
    local_update: LocalUpdateConfig = field(default_factory=LocalUpdateConfig)
    """Local updates in place of a reduction in each optimizer step."""

    def __post_init__(self) -> None:
        """Checks what concerns more than one section."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", self.run_id):
            raise ValueError(
                f"run_id {self.run_id!r} must be 1 to 64 letters, digits, dots, dashes or underscores, and may not "
                "begin with a dot or a dash: folders are named after it"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be in [0, 2**63)")
        _between("num_steps", self.num_steps, 0, LARGEST_STEPS)
        _at_least("min_workers", self.min_workers, 1)
        _between("max_workers", self.max_workers, 1, LARGEST_MICROBATCHES)
        _at_least("audit_every", self.audit_every, 0)
        _one_of("precision", self.precision, ("float32", "bfloat16"))
        _one_of("non_finite", self.non_finite, ("halt", "skip", "quarantine"))
        _at_least("quarantine_after", self.quarantine_after, 1)
        _one_of("wire_type", self.wire_type, WIRE_DTYPES)
        _one_of("topology", self.topology, TOPOLOGIES)
        if self.topology == "torch" and self.wire_type != "float32":
            raise ValueError(
                f"wire_type is {self.wire_type}; with topology torch it must be float32, which torch sends"
            )
        if self.start_workers and self.start_workers < self.min_workers:
            raise ValueError(f"start_workers ({self.start_workers}) is less than min_workers ({self.min_workers})")
        if self.local_update.enabled and not self.batch.microbatches:
            raise ValueError("local_update.enabled needs batch.microbatches: the inner steps of all workers together")
        if self.max_workers < self.num_starters:
            raise ValueError(f"max_workers ({self.max_workers}) is less than the {self.num_starters} to start with")
        if self.task.name and not self.num_steps:
            raise ValueError("num_steps is 0; a run with a task needs a number of steps")
        if self.num_steps and self.state.resume_step >= self.num_steps:
            raise ValueError(
                f"state.resume_step ({self.state.resume_step}) must be less than num_steps ({self.num_steps})"
            )
        if self.optimizer.schedule == "cosine" and 0 < self.num_steps <= self.optimizer.warmup_steps:
            raise ValueError(
                f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) must be less than num_steps ({self.num_steps})"
            )

    @property
    def num_starters(self) -> int:
        """Workers that the run waits for before its first step."""
        return self.start_workers or self.min_workers


def _between(name: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} is {value}; it must be {minimum} to {maximum}")


def _at_least(name: str, value: float, minimum: float) -> None:
    if not value >= minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
