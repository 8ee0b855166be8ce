"""What a worker asks of the coordinator about regions, and what it is told.  [core]

A worker says first which membership is its own, then lends regions, asks for them back, and borrows those of the
coordinator. Each request is answered before the next one is read: with an answer, or with a refusal, after which the
conversation goes on. A region's descriptor comes with the message that lends it.
"""

from dataclasses import dataclass
from typing import Any

from ayni.shm import json_messages
from ayni.shm.json_messages import decode, encode, number

MAX_SESSION_CHARS = 256
_ID_BITS = 63
_SIZE_BITS = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """Says whose connection this is."""

    session: str
    """Secret of the membership."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lend:
    """Offers a region to be read; comes with its descriptor."""

    region: int
    size: int
    """Of the payload, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Withdraw:
    """Takes a lent region back; nobody needs to read it any more."""

    region: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Borrow:
    """Asks for a region of the coordinator."""

    region: int


Request = Hello | Lend | Withdraw | Borrow


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionAnswer:
    """Says that a request was fulfilled."""

    size: int = 0
    """Payload of the region that was borrowed, in bytes; its descriptor comes along. 0 where none was."""


def encode_request(request: Request) -> bytes:
    """Returns a request as bytes."""
    match request:
        case Hello():
            return encode(ask="hello", session=request.session)
        case Lend():
            return encode(ask="lend", region=f"{request.region:x}", size=f"{request.size:x}")
        case Withdraw():
            return encode(ask="withdraw", region=f"{request.region:x}")
        case Borrow():
            return encode(ask="borrow", region=f"{request.region:x}")


def decode_request(data: bytes) -> Request:
    """Returns what a request says; raises BadRequest when it can't be read."""
    return decode(data, "request", _request_of)


def encode_answer(answer: RegionAnswer) -> bytes:
    """Returns an answer as bytes."""
    return encode(size=f"{answer.size:x}")


def decode_answer(data: bytes) -> RegionAnswer:
    """Returns what an answer says; raises the refusal in it, or BadRequest when it can't be read."""
    return json_messages.decode_answer(data, "answer", lambda values: RegionAnswer(size=_size(values)))


def _request_of(values: Any) -> Request:
    match values["ask"]:
        case "hello":
            return Hello(session=_session(values["session"]))
        case "lend":
            if not (size := _size(values)):
                raise ValueError("a region of 0 bytes")
            return Lend(region=_id(values), size=size)
        case "withdraw":
            return Withdraw(region=_id(values))
        case "borrow":
            return Borrow(region=_id(values))
        case other:
            raise ValueError(f"{other!r} is no request")


def _id(values: Any) -> int:
    return number(values["region"], _ID_BITS)


def _size(values: Any) -> int:
    return number(values["size"], _SIZE_BITS)


def _session(text: Any) -> str:
    if not (isinstance(text, str) and text.isascii() and 1 <= len(text) <= MAX_SESSION_CHARS):
        raise ValueError(f"a session has 1 to {MAX_SESSION_CHARS} ASCII characters")
    return text
