"""What two workers of one host say to one another about shared memory: the export, a request, its answer.  [core]"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from ayni.blocks.layouts import LayoutHandle
from ayni.shm import json_messages
from ayni.shm.host import HostIdentity, check_folder, socket_name
from ayni.shm.json_messages import decode, encode, number

MAX_LAYOUTS = 1024
"""Layouts of one export."""


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


def encode_export(export: ShmExport) -> bytes:
    """Returns an export as bytes."""
    return encode(
        host=asdict(export.host),
        folder=export.folder,
        incarnation=f"{export.incarnation:x}",
        layouts=[f"{int(handle):x}" for handle in export.layouts],
    )


def decode_export(data: bytes) -> ShmExport:
    """Returns what an export says; raises BadRequest when it can't be read."""
    return decode(data, "export", _export_of)


def encode_request(request: PoolRequest) -> bytes:
    """Returns a request as bytes."""
    return encode(incarnation=f"{request.incarnation:x}", layout=f"{int(request.layout):x}")


def decode_request(data: bytes) -> PoolRequest:
    """Returns what a request says; raises BadRequest when it can't be read."""
    return decode(data, "request", _request_of)


def encode_answer(answer: PoolAnswer) -> bytes:
    """Returns an answer as bytes."""
    return encode(epoch=answer.epoch, start=answer.start)


def decode_answer(data: bytes) -> PoolAnswer:
    """Returns what an answer says; raises the refusal in it, or BadRequest when it can't be read."""
    return json_messages.decode_answer(data, "answer", _answer_of)


def _export_of(values: Any) -> ShmExport:
    check_folder(values["folder"])
    if len(values["layouts"]) > MAX_LAYOUTS:
        raise ValueError(f"{len(values['layouts'])} layouts; at most {MAX_LAYOUTS}")
    return ShmExport(
        host=HostIdentity(**{field.name: values["host"][field.name] for field in fields(HostIdentity)}),
        folder=values["folder"],
        incarnation=number(values["incarnation"], 64),
        layouts=tuple(LayoutHandle.from_int(number(text, 128)) for text in values["layouts"]),
    )


def _request_of(values: Any) -> PoolRequest:
    layout = LayoutHandle.from_int(number(values["layout"], 128))
    return PoolRequest(incarnation=number(values["incarnation"], 64), layout=layout)


def _answer_of(values: Any) -> PoolAnswer:
    epoch, start = values["epoch"], values["start"]
    if not (isinstance(epoch, int) and isinstance(start, int) and start >= 0):
        raise ValueError(f"epoch {epoch!r}, start {start!r}")
    return PoolAnswer(epoch=epoch, start=start)
