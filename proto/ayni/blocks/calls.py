"""What the calls about blocks ask for, where it is more than one value, and the name of the one under way.  [core]"""

from contextvars import ContextVar
from dataclasses import dataclass

from ayni.blocks.ids import Ids
from ayni.blocks.layouts import LocalLayout
from ayni.blocks.metadata import WorkerMetadata
from ayni.blocks.transfers import PullPlan, RemoteDescriptor, TransferOptions
from ayni.errors import BadRequest

call_id: ContextVar[str] = ContextVar("ayni_call_id", default="")
"""Set by the leader for each group call, the same on all ranks; empty outside of one. A stub sends it on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connect:
    """See `BlockWorker.connect_remote`."""

    instance_id: str
    metadata: tuple[WorkerMetadata, ...]
    engines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTransfer:
    """See `BlockWorker.execute_local_transfer`."""

    source: LocalLayout
    destination: LocalLayout
    source_blocks: Ids
    destination_blocks: Ids
    options: TransferOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Onboard:
    """See `BlockWorker.execute_remote_onboard`."""

    source: RemoteDescriptor
    destination: LocalLayout
    destination_blocks: Ids
    options: TransferOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """See `BlockWorker.execute_remote_offload`."""

    source: LocalLayout
    source_blocks: Ids
    destination: RemoteDescriptor
    options: TransferOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """See `RankWorker.execute_remote_pull`."""

    plan: PullPlan
    options: TransferOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Has:
    """See `BlockWorker.has_blocks`."""

    layout: LocalLayout
    keys: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Remove:
    """See `BlockWorker.remove_blocks`."""

    layout: LocalLayout
    keys: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Put:
    """See `BlockWorker.put_blocks`."""

    source: LocalLayout
    source_blocks: Ids
    keys: tuple[bytes, ...]
    lock_validity_s: float | None = None

    def __post_init__(self) -> None:
        """Checks the validity."""
        if self.lock_validity_s is not None and not 0 < self.lock_validity_s < 1e12:
            raise BadRequest(
                f"lock_validity_s is {self.lock_validity_s:g}; it must be more than 0 s and finite",
                field="lock_validity_s",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Get:
    """See `BlockWorker.get_blocks`."""

    keys: tuple[bytes, ...]
    destination: LocalLayout
    destination_blocks: Ids
