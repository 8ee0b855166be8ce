"""How a worker joins a run.  [core]"""

from dataclasses import dataclass, field
from datetime import timedelta

from ayni.endpoints import ClientTls, Keepalive, ServerTls
from ayni.step_values import Origin
from worker_agent.faults import START_AGAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """How a worker joins a run."""

    coordinator: str
    """Address of the coordinator, host:port."""
    token: str = field(repr=False)
    """The run's join token."""
    run_id: str = ""
    """Run to join; empty for whichever the coordinator has."""
    worker_name: str = ""
    """Name among the run's workers; empty for host name and process id."""
    tls: ClientTls = field(default_factory=ClientTls)
    """Whom to trust. Without an authority the connection is in clear, which only loopback allows."""
    insecure: bool = False
    """Speak in clear although others may read along."""
    keepalive: Keepalive = field(default_factory=Keepalive)
    """When a silent coordinator is taken for dead."""
    wire_types: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """Element types that gradients may travel in; the run decides."""
    connect_timeout: timedelta = timedelta(seconds=60)
    """How long to try to reach the coordinator."""
    exchange_timeout: timedelta = timedelta(minutes=40)
    """Longest time for one bucket or one commit. Longer than the coordinator's own limit for a step, so that its
    verdict, which names the culprit, comes first."""
    shard_timeout: timedelta = timedelta(hours=24)
    """Longest wait for an assignment, which includes waiting for other workers to join."""
    device_names: tuple[str, ...] = ()
    """Names of the accelerators, for status."""
    worker_address: str = ""
    """Where this worker's own service listens; empty when nobody can dial it."""
    task_fingerprint: str = ""
    """Hash of the model and its trainable parameters; empty for not checked."""
    task_summary: str = ""
    """What the fingerprint stands for, in words."""
    dataset_fingerprint: str = ""
    """Hash of the training data; empty for not checked."""
    dataset_summary: str = ""
    """What the fingerprint stands for, in words."""
    num_training_samples: int = 0
    """Samples in the training data; 0 for not said."""
    num_evaluation_samples: int = 0
    """Samples in the held-out data."""
    num_blocks: int = 0
    """Transformer blocks of the model, for `contribute` with a block's bucket."""
    completed_steps: int = 0
    """Updates that the parameters have had."""
    origin: Origin | None = None
    """Where the last of them came from; None for not known."""
    parameters_sha256: str = ""
    """Hash of the trainable parameters; empty for not checked."""
    num_buckets: int = 0
    """Buckets that a step's contributions consist of, for `contribute`; 0 for not said. Where it is said, the work of
    this worker counts as soon as the last byte has left, even if it dies then."""
    elastic: bool = False
    """Take extra leases in the middle of a step (`commit` returns them), contribute again when a sum is lost, and come
    back when the coordinator was lost. Not for the simple calls."""
    rejoin_timeout: timedelta = timedelta(minutes=10)
    """How long to try to come back, if `elastic`."""
    max_microbatches: int = 0
    """Most micro-batches of one step that this worker takes; 0 for no limit."""
    memory_bytes: int = 0
    """Memory that this worker computes in; 0 for not said."""
    peer_address: str = ""
    """Where other workers dial this one to have slices reduced, where the run's workers reduce among themselves; empty:
    the address of `peer_listen`. A worker that nobody can dial reduces nothing for others."""
    peer_listen: str = ""
    """Where to listen for that, host:port, where no agent of this worker listens already. Empty: nowhere."""
    server_tls: ServerTls = field(default_factory=ServerTls)
    """TLS of what listens at `peer_listen`."""
    store_listen: str = ""
    """Host, without a port, at which to open a store where groups of torch.distributed find one another, in a run of
    topology "torch". Empty: none, and no part in such a run."""
    lost_advice: str = START_AGAIN
    """What `CoordinatorLost` tells people to do."""
    gradients: str = "auto"
    """How gradients travel: "auto" through memory shared with the coordinator, or the workers that reduce slices, where
    they run on this host, as the same user; "grpc" always over gRPC."""
