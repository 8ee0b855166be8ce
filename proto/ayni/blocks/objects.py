"""Stored objects: whether a key is there, how a put or a get of it ended, and where objects are stored.  [core]"""

from dataclasses import dataclass
from enum import Enum

from ayni.blocks.transfers import Failure


class PresenceState(Enum):
    """Whether the object tier holds a key."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class OutcomeState(Enum):
    """How one key of a call ended."""

    DONE = "done"
    ALREADY_PRESENT = "already_present"
    ABSENT = "absent"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """Whether one key is stored."""

    state: PresenceState
    size_bytes: int = 0
    """Bytes of the block in the object, without the header; 0 unless present."""
    failure: Failure | None = None
    """Why an object that is there counts as absent, or why it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyOutcome:
    """How one key of a put or get ended."""

    state: OutcomeState
    size_bytes: int = 0
    failure: Failure | None = None

    @property
    def is_success(self) -> bool:
        """Whether the key is stored (put), or its block is loaded (get)."""
        return self.state in (OutcomeState.DONE, OutcomeState.ALREADY_PRESENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class PresenceReport:
    """Answer to `has_blocks`: one entry for each key, in input order."""

    presences: tuple[Presence, ...]
    """Of a group: rank 0's answer."""
    by_rank: tuple[tuple[Presence, ...], ...] = ()
    """Every rank's answer, by rank."""

    @property
    def disagreements(self) -> tuple[int, ...]:
        """Places of the keys on which the ranks' states differ."""
        return tuple(
            i for i, states in enumerate(zip(*self.by_rank, strict=True)) if len({s.state for s in states}) > 1
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyReport:
    """Answer to `put_blocks` and `get_blocks`: one entry for each key, in input order."""

    outcomes: tuple[KeyOutcome, ...]
    """Of a group: success only if every rank that was asked succeeded, else the first failure by rank."""
    by_rank: tuple[tuple[KeyOutcome | None, ...], ...] = ()
    """Every rank's answer, by rank; None where a rank was not asked for a key."""

    @property
    def is_done(self) -> bool:
        """Whether every key succeeded."""
        return all(outcome.is_success for outcome in self.outcomes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectStoreConfig:
    """Where objects are stored. Credentials are never part of it: a worker has its own."""

    kind: str
    """ "file", "s3", "gcs" or "azure"."""
    bucket: str
    """With "file" a folder relative to the root that the worker was started with."""
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    path_style: bool = False
    max_requests: int = 16
    request_timeout_s: float = 30.0
