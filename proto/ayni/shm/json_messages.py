"""How the sockets of shared memory put values into messages, and refusals.  [core]

All are JSON. Numbers of 64 and 128 bits travel as hexadecimal text. Whatever can't be read is refused, whoever sent
it: the sockets are open to every program of the user.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from ayni.errors import BY_REASON, AyniError, BadRequest, Fault

MAX_MESSAGE_BYTES = 1 << 16
_MAX_DETAIL = 200
"""Characters of what a reader stumbled over."""

T = TypeVar("T")


def encode(**values: object) -> bytes:
    """Returns values as a message."""
    return json.dumps(values).encode()


def encode_refusal(error: AyniError) -> bytes:
    """Returns a refusal as a message."""
    return encode(reason=error.reason, message=error.message, metadata=error.metadata)


def decode(data: bytes, what: str, build: Callable[[Any], T]) -> T:
    """Returns what `build` makes of a message's values; whatever it stumbles over is refused.

    Args:
        data: the message.
        what: what it should be, for errors.
        build: raises ValueError, KeyError, TypeError or AttributeError.

    Raises:
        BadRequest: it can't be read.
    """
    try:
        return build(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # Cut, because the refusal has to fit into a message as well.
        detail = repr(error)[:_MAX_DETAIL]
        raise BadRequest(f"a message of shared memory, the {what}, can't be read: {detail}", field=what) from None


def decode_answer(data: bytes, what: str, build: Callable[[Any], T]) -> T:
    """Does what `decode` does with an answer; raises the refusal where it is one."""

    def answer_of(values: Any) -> T | AyniError:
        return _refusal(values) if "reason" in values else build(values)

    answer = decode(data, what, answer_of)
    if isinstance(answer, AyniError):
        raise answer
    return answer


def number(text: str, bits: int) -> int:
    """Returns a number that travels as hexadecimal text; raises ValueError when it has more bits."""
    value = int(text, 16)
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{text} does not fit into {bits} bits")
    return value


def _refusal(values: Any) -> AyniError:
    metadata = {str(key): str(value) for key, value in values["metadata"].items()}
    return BY_REASON.get(values["reason"], Fault)(str(values["message"]), **metadata)
