"""Small values as messages and back, for both sides.  [shell]"""

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from ayni.step_values import Origin, StepTimes
from ayni.v1 import coordinator_pb2 as pb
from ayni.v1 import tensor_pb2

_MAX_SECONDS = 1e9
_PARTS = ("compute", "exchange", "commit_wait", "update", "data")


def duration(seconds: float) -> Duration:
    """Returns seconds as a message."""
    result = Duration()
    result.FromTimedelta(timedelta(seconds=seconds))
    return result


def dtype_enum(name: str) -> "tensor_pb2.DType.ValueType":
    """Returns the enum value of an element type's name."""
    return tensor_pb2.DType.Value(f"DTYPE_{name.upper()}")


def dtype_name(value: int) -> str:
    """Returns the name of an element type; empty for one that this version does not know."""
    try:
        return tensor_pb2.DType.Name(value)[len("DTYPE_") :].lower()  # type: ignore[arg-type]
    except ValueError:
        return ""


def seconds_of(message: Duration) -> float:
    """Returns a length of time that was received, in seconds: 0 to 10^9, whatever was sent."""
    return min(max(message.seconds + message.nanos / 1e9, 0.0), _MAX_SECONDS)


def times_of(message: pb.StepTimes) -> StepTimes:
    """Returns where a worker's time went; see `seconds_of`."""
    return StepTimes(**{part: seconds_of(getattr(message, part)) for part in _PARTS})


def origin_of(message: pb.ShardAssignmentRequest | pb.HeartbeatRequest | pb.CommitStepRequest) -> Origin | None:
    """Returns where the caller's last update came from; None where it does not say."""
    if not message.HasField("origin"):
        return None
    return Origin(epoch=message.origin.epoch, attempt=message.origin.attempt)


def origin_message(origin: Origin | None) -> pb.StateOrigin | None:
    """Returns where the last update came from, as a message; None for not said."""
    return pb.StateOrigin(epoch=origin.epoch, attempt=origin.attempt) if origin else None


def times_message(times: StepTimes) -> pb.StepTimes:
    """Returns where a worker's time went, as a message."""
    return pb.StepTimes(**{part: duration(getattr(times, part)) for part in _PARTS})
