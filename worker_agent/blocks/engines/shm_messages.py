"""What two workers of one host say to one another about shared memory: the export, a request, its answer.  [core]

All are JSON. Numbers of 64 and 128 bits travel as hexadecimal text. Whatever can't be read is refused, whoever sent
it: the socket is open to every program of the user.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ayni.blocks.layouts import LayoutHandle
from ayni.errors import BY_REASON, AyniError, BadRequest, Fault

MAX_MESSAGE_BYTES = 1 << 16
MAX_LAYOUTS = 1024
"""Layouts of one export."""

_SOCKET_SUFFIX = ".sock"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostIdentity:
    """What two processes have in common that can share memory with one another."""

    boot_id: str
    pid_namespace: int
    uid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShmExport:
    """Where a worker's shared memory is asked for."""

    host: HostIdentity
    folder: str
    """Absolute path of the folder of its socket."""
    incarnation: int
    """Of the engine, random; names the socket as well."""
    layouts: tuple[LayoutHandle, ...]
    """What it lends."""

    @property
    def socket_name(self) -> str:
        """Name of its socket inside the folder."""
        return socket_name(self.incarnation)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRequest:
    """Asks for one layout's memory."""

    incarnation: int
    layout: LayoutHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolAnswer:
    """Comes with two descriptors: data and control."""

    epoch: int
    start: int
    """Where the first allocation begins in the data, in bytes."""


def socket_name(incarnation: int) -> str:
    """Returns the name of an engine's socket."""
    return f"shm-{incarnation:016x}{_SOCKET_SUFFIX}"


def is_socket_name(name: str) -> bool:
    """Says whether a file is an engine's socket."""
    middle = name.removeprefix("shm-").removesuffix(_SOCKET_SUFFIX)
    return name == f"shm-{middle}{_SOCKET_SUFFIX}" and len(middle) == 16 and set(middle) <= set("0123456789abcdef")


def encode_export(export: ShmExport) -> bytes:
    """Returns an export as bytes."""
    return _encode(
        host=asdict(export.host),
        folder=export.folder,
        incarnation=f"{export.incarnation:x}",
        layouts=[f"{int(handle):x}" for handle in export.layouts],
    )


def decode_export(data: bytes) -> ShmExport:
    """Returns what an export says; raises BadRequest when it can't be read."""
    return _decode(data, "export", _export_of)


def encode_request(request: PoolRequest) -> bytes:
    """Returns a request as bytes."""
    return _encode(incarnation=f"{request.incarnation:x}", layout=f"{int(request.layout):x}")


def decode_request(data: bytes) -> PoolRequest:
    """Returns what a request says; raises BadRequest when it can't be read."""
    return _decode(data, "request", _request_of)


def encode_answer(answer: PoolAnswer) -> bytes:
    """Returns an answer as bytes."""
    return _encode(epoch=answer.epoch, start=answer.start)


def encode_refusal(error: AyniError) -> bytes:
    """Returns a refusal as bytes."""
    return _encode(reason=error.reason, message=error.message, metadata=error.metadata)


def decode_answer(data: bytes) -> PoolAnswer:
    """Returns what an answer says; raises the refusal in it, or BadRequest when it can't be read."""
    answer = _decode(data, "answer", _answer_of)
    if isinstance(answer, AyniError):
        raise answer
    return answer


def _encode(**values: object) -> bytes:
    return json.dumps(values).encode()


def _decode(data: bytes, what: str, build: Callable[[Any], T]) -> T:
    try:
        return build(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRequest(f"the {what} of a shm engine can't be read: {error!r}", field=what) from None


def _export_of(values: Any) -> ShmExport:
    # A lone surrogate can't be encoded, which is a ValueError as well.
    if b"\0" in os.fsencode(values["folder"]):
        raise ValueError(f"folder {values['folder']!r} has a zero in it")
    if not Path(values["folder"]).is_absolute():
        raise ValueError(f"folder {values['folder']!r} is not absolute")
    if len(values["layouts"]) > MAX_LAYOUTS:
        raise ValueError(f"{len(values['layouts'])} layouts; at most {MAX_LAYOUTS}")
    return ShmExport(
        host=HostIdentity(**{field.name: values["host"][field.name] for field in fields(HostIdentity)}),
        folder=values["folder"],
        incarnation=_number(values["incarnation"], 64),
        layouts=tuple(LayoutHandle.from_int(_number(text, 128)) for text in values["layouts"]),
    )


def _request_of(values: Any) -> PoolRequest:
    layout = LayoutHandle.from_int(_number(values["layout"], 128))
    return PoolRequest(incarnation=_number(values["incarnation"], 64), layout=layout)


def _answer_of(values: Any) -> PoolAnswer | AyniError:
    if "reason" in values:
        metadata = {str(key): str(value) for key, value in values["metadata"].items()}
        return BY_REASON.get(values["reason"], Fault)(str(values["message"]), **metadata)
    epoch, start = values["epoch"], values["start"]
    if not (isinstance(epoch, int) and isinstance(start, int) and start >= 0):
        raise ValueError(f"epoch {epoch!r}, start {start!r}")
    return PoolAnswer(epoch=epoch, start=start)


def _number(text: str, bits: int) -> int:
    value = int(text, 16)
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{text} does not fit into {bits} bits")
    return value
