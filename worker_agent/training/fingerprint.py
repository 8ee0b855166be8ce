"""Hashes that two workers compare before they train together.  [shell]"""

import hashlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import nn


def task_fingerprint(model_name: str, parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Returns SHA-256 over a model's name and the names, shapes and dtypes of its trainable parameters, in hex."""
    digest = hashlib.sha256(_field(model_name))
    for name, parameter in parameters:
        digest.update(_field(f"{name} {tuple(parameter.shape)} {parameter.dtype}"))
    return digest.hexdigest()


def arrays_sha256(named: Iterable[tuple[str, npt.NDArray[np.float32]]]) -> str:
    """Returns SHA-256 over names, shapes and little-endian float32 bytes, in the order given, in hex."""
    digest = hashlib.sha256()
    for name, values in named:
        digest.update(_field(f"{name} {values.shape}"))
        digest.update(_little_endian(values))
    return digest.hexdigest()


def parameters_sha256(parameters: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Returns `arrays_sha256` of parameters, as float32."""
    return arrays_sha256((name, parameter.detach().float().cpu().numpy()) for name, parameter in parameters)


def samples_sha256(samples: Iterable[tuple[Sequence[int] | npt.NDArray[np.integer], int]]) -> str:
    """Returns SHA-256 over (token ids, label) samples, in order, in hex."""
    digest = hashlib.sha256()
    for tokens, label in samples:
        ids = np.asarray(tokens, np.dtype("<i8"))
        digest.update(np.array([label, ids.size], np.dtype("<i8")).tobytes() + ids.tobytes())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Returns SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _field(text: str) -> bytes:
    data = text.encode("utf-8")
    return len(data).to_bytes(8, "little") + data


def _little_endian(values: npt.NDArray[np.float32]) -> memoryview:
    contiguous = np.ascontiguousarray(values)
    if sys.byteorder == "big":
        contiguous = contiguous.byteswap()
    return contiguous.reshape(-1).view(np.uint8).data
