"""Every refusal that a service gives, one class per reason.  [core]

Theory of operation. A core function raises one of these; `ayni.rpc` turns it into a gRPC status with an ErrorInfo
detail, and turns such a status back into the same class on the other side. Nobody parses messages. `code` uses only
status codes that the gRPC library never produces itself, so any other code that a client sees means transport.

The reasons are those of `ayni/v1/errors.proto`; a unit test keeps the two lists equal.
"""

from typing import ClassVar


class AyniError(Exception):
    """Base of all refusals.

    Attributes:
        code: name of the gRPC status code, such as "ABORTED".
        reason: the enum value's name without its ERROR_REASON_ prefix.
        metadata: the values that errors.proto names for the reason, as text.
    """

    code: ClassVar[str] = "UNKNOWN"
    reason: ClassVar[str] = "UNSPECIFIED"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}

    @property
    def message(self) -> str:
        """Sentence for people: what, where, which side, what to do."""
        return str(self.args[0])


class FailedPrecondition(AyniError):
    """You are out of date, not allowed or not ready."""

    code = "FAILED_PRECONDITION"


class InvalidArgument(AyniError):
    """Your request is wrong; sending it again can't help."""

    code = "INVALID_ARGUMENT"


class NotFound(AyniError):
    """There is no such thing here."""

    code = "NOT_FOUND"


class AlreadyExists(AyniError):
    """Somebody holds this already."""

    code = "ALREADY_EXISTS"


class Aborted(AyniError):
    """The joint work ended; nobody's fault here."""

    code = "ABORTED"


class TokenRefused(FailedPrecondition):
    """The join token is absent or wrong."""

    reason = "TOKEN_REFUSED"


class Incompatible(FailedPrecondition):
    """Both sides differ in something that Join negotiates."""

    reason = "INCOMPATIBLE"


class IdentityTaken(AlreadyExists):
    """A live worker already holds this name."""

    reason = "IDENTITY_TAKEN"


class WorldFull(FailedPrecondition):
    """The run has all the workers that it may have."""

    reason = "WORLD_FULL"


class RunStarted(FailedPrecondition):
    """The run has committed steps and the caller holds no state of it."""

    reason = "RUN_STARTED"


class RunEnded(FailedPrecondition):
    """The run is over."""

    reason = "RUN_ENDED"


class UnknownWorker(NotFound):
    """No live worker has this id, or the session is another's."""

    reason = "UNKNOWN_WORKER"


class StaleEpoch(FailedPrecondition):
    """The caller speaks of an epoch that is over."""

    reason = "STALE_EPOCH"


class StaleStep(FailedPrecondition):
    """The caller speaks of a step or attempt that is not open."""

    reason = "STALE_STEP"


class StepVoided(Aborted):
    """The attempt was given up before its commit."""

    reason = "STEP_VOIDED"


class NotLeased(InvalidArgument):
    """The micro-batches are not those of the caller's lease."""

    reason = "NOT_LEASED"


class SpecMismatch(InvalidArgument):
    """The tensor differs from the one the round was opened with."""

    reason = "SPEC_MISMATCH"


class BadChunk(InvalidArgument):
    """A chunk has a wrong offset, length or part."""

    reason = "BAD_CHUNK"


class NonFinite(InvalidArgument):
    """A value is NaN or infinite."""

    reason = "NON_FINITE"


class WeightMismatch(InvalidArgument):
    """The weight of a micro-batch differs between two buckets, or is negative."""

    reason = "WEIGHT_MISMATCH"


class BadRequest(InvalidArgument):
    """A frame or request can't be read, or a required field is unset."""

    reason = "BAD_REQUEST"


class TooLarge(InvalidArgument):
    """A declared size is above a limit."""

    reason = "TOO_LARGE"


class Duplicate(AlreadyExists):
    """These micro-batches were already contributed."""

    reason = "DUPLICATE"


class Diverged(FailedPrecondition):
    """Workers' parameters differ."""

    reason = "DIVERGED"


class Halted(FailedPrecondition):
    """The run stopped because of an error that a policy says to stop for."""

    reason = "HALTED"


class UnknownArtifact(NotFound):
    """The run has no artifact with this hash."""

    reason = "UNKNOWN_ARTIFACT"


class Checksum(AyniError):
    """Bytes do not match their checksum."""

    code = "DATA_LOSS"
    reason = "CHECKSUM"


class Deadline(Aborted):
    """A wait reached its deadline."""

    reason = "DEADLINE"


class UnknownLayout(NotFound):
    """No such layout handle on this worker."""

    reason = "UNKNOWN_LAYOUT"


class UnknownBlock(AyniError):
    """A block id is outside its layout."""

    code = "OUT_OF_RANGE"
    reason = "UNKNOWN_BLOCK"


class IncompatibleLayout(FailedPrecondition):
    """Two layouts can't be transferred between one another."""

    reason = "INCOMPATIBLE_LAYOUT"


class BlockBusy(Aborted):
    """A destination block is being written by another transfer."""

    reason = "BLOCK_BUSY"


class UnknownPeer(NotFound):
    """The peer is not connected."""

    reason = "UNKNOWN_PEER"


class PeerLost(Aborted):
    """The peer was lost while a transfer with it was under way, or can't be reached."""

    reason = "PEER_LOST"


class StorageFailed(Aborted):
    """A disk or an object store failed: full, cut short, not there, not answering."""

    reason = "STORAGE_FAILED"


class Unsupported(InvalidArgument):
    """An option or a combination that this worker can't do."""

    reason = "UNSUPPORTED"


class Claimed(Aborted):
    """Another group has claimed the key and is storing it."""

    reason = "CLAIMED"


class Cancelled(Aborted):
    """The caller gave the transfer up."""

    reason = "CANCELLED"


class Fault(Aborted):
    """Something that nobody foresaw; a bug of whoever says it."""

    reason = "FAULT"


class UnknownObject(NotFound):
    """The object tier holds no whole object of this layout under the key."""

    reason = "UNKNOWN_OBJECT"


class RoundRestarted(Aborted):
    """Bytes of another contribution to this bucket were lost, so the sum starts again; contribute once more."""

    reason = "ROUND_RESTARTED"


class LeaseRevoked(FailedPrecondition):
    """The lease was taken back: others contribute its micro-batches."""

    reason = "LEASE_REVOKED"


class Quarantined(FailedPrecondition):
    """The worker was shut out of the run because its values were not finite too often."""

    reason = "QUARANTINED"


class IdentityRefused(FailedPrecondition):
    """The client certificate does not allow this worker name."""

    reason = "IDENTITY_REFUSED"


def _leaves(base: type[AyniError]) -> list[type[AyniError]]:
    children = base.__subclasses__()
    return [base] if not children else [leaf for child in children for leaf in _leaves(child)]


BY_REASON: dict[str, type[AyniError]] = {cls.reason: cls for cls in _leaves(AyniError)}
"""Class for each reason word."""
