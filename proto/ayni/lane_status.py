"""How a lane ended, as a message, and back.  [shell]"""

import grpc

from ayni import rpc
from ayni.errors import BY_REASON, AyniError
from ayni.v1 import coordinator_pb2 as pb

SUCCESS = pb.LaneStatus()
"""All is well."""
FAILED = pb.LaneStatus(code=grpc.StatusCode.UNKNOWN.value[0], message="the lane failed; the coordinator's log says why")
"""A bug ended it; no verdict."""

_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def refusal_status(error: AyniError) -> pb.LaneStatus:
    """Returns the status that tells of a refusal, trimmed as that of a call is."""
    info = rpc.info_of(error)
    return pb.LaneStatus(
        code=grpc.StatusCode[error.code].value[0],
        message=rpc.trimmed_message(error),
        reason=info.reason,
        metadata=dict(info.metadata),
    )


def refusal_of(status: pb.LaneStatus) -> AyniError | None:
    """Returns the refusal that a status tells of; None where it is none."""
    if not status.reason:
        return None
    known = BY_REASON.get(status.reason)
    error = (known or AyniError)(status.message)
    error.metadata = dict(status.metadata) | ({} if known else {"reason": status.reason})
    return error


def code_name(status: pb.LaneStatus) -> str:
    """Returns the name of the status code."""
    return _NAMES.get(status.code, f"code {status.code}")
