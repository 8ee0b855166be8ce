"""The run's files, named by their content.  [shell]

A worker asks for a SHA-256, never for a path, so nothing outside the folder can be asked for. Links that lead out of
the folder are refused when the list is made, and a file that changed since then is not served.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ayni.errors import BadRequest, Checksum, UnknownArtifact

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactFile:
    """A file of the run."""

    name: str
    sha256: str
    size_bytes: int
    path: Path
    modified_ns: int


class Artifacts:
    """All files below one folder."""

    def __init__(self, folder: Path | None) -> None:
        """Lists and hashes the files.

        Args:
            folder: the folder; None for a run without files.

        Raises:
            ValueError: the folder is missing, or a link leads out of it.
        """
        self.files = [] if folder is None else _listed(folder)
        self._by_hash = {file.sha256: file for file in self.files}

    def open(self, sha256: str, offset_bytes: int) -> "Iterator[tuple[int, bytes]]":
        """Returns the (offset, bytes) chunks of a file, from an offset to its end; an empty rest is one empty chunk.

        Raises:
            UnknownArtifact: no file has this hash.
            BadRequest: the offset is past the end.
            Checksum: the file changed since the run was started.
        """
        file = self._by_hash.get(sha256)
        if file is None:
            raise UnknownArtifact(f"the run has no file with SHA-256 {sha256[:64]!r}", sha256=sha256[:64])
        if offset_bytes > file.size_bytes:
            raise BadRequest(
                f"{file.name} has {file.size_bytes} bytes; a fetch can't start at {offset_bytes}", field="offset_bytes"
            )
        if _identity(file.path) != (file.modified_ns, file.size_bytes):
            raise Checksum(
                f"{file.name} changed or went away on the coordinator's disk since the run was started; "
                "restart the coordinator",
                name=file.name,
                expected=sha256,
                received="another content",
            )
        return _chunks(file.path, offset_bytes)


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns what tells an unchanged file; None when it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _chunks(path: Path, offset_bytes: int) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as stream:
        stream.seek(offset_bytes)
        data = stream.read(CHUNK_BYTES)
        yield offset_bytes, data
        while data:
            offset_bytes += len(data)
            data = stream.read(CHUNK_BYTES)
            if data:
                yield offset_bytes, data


def _listed(folder: Path) -> list[ArtifactFile]:
    if not folder.is_dir():
        raise ValueError(f"artifacts: {folder} is not a folder; prepare the data first, or correct the run file")
    root = folder.resolve()
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    for path in paths:
        if not path.resolve().is_relative_to(root) or not path.resolve().is_file():
            raise ValueError(
                f"artifacts: {path} leads out of {folder} or is not a file; copy it in, or remove the link"
            )
    return [_hashed(root, root / path.relative_to(folder)) for path in paths]


def _hashed(root: Path, path: Path) -> ArtifactFile:
    status = path.stat()
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ArtifactFile(
        name=path.relative_to(root).as_posix(),
        sha256=digest,
        size_bytes=status.st_size,
        path=path,
        modified_ns=status.st_mtime_ns,
    )
