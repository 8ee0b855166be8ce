"""Which names and sizes of files a worker accepts from a coordinator.  [core]

A coordinator is trusted with the training, not with this machine's files: no name may lead out of the folder that the
files are put in.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_NAME_BYTES = 1024
_MAX_FILES = 100_000
_MAX_FILE_BYTES = 1 << 44


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A file of the run."""

    name: str
    """Relative path with forward slashes."""
    sha256: str
    """Of the content, in hex."""
    size_bytes: int


def check_artifacts(artifacts: Iterable[Artifact]) -> None:
    """Checks a run's list of files.

    Raises:
        ValueError: a name, hash or size is not acceptable, or two names collide; the sentence says which and why.
    """
    seen: set[str] = set()
    for number, artifact in enumerate(artifacts):
        reason = _refusal(artifact)
        if number >= _MAX_FILES:
            reason = f"there are more than {_MAX_FILES} files"
        if artifact.name in seen:
            reason = "the name occurs twice"
        if reason:
            raise ValueError(f"the coordinator offers a file {artifact.name!r}, which is refused: {reason}")
        seen.add(artifact.name)
    for name in sorted(seen):
        above = next((parent for parent in _parents(name) if parent in seen), None)
        if above:
            raise ValueError(f"the coordinator offers {name!r} and {above!r}: one would be a folder and a file")


def _refusal(artifact: Artifact) -> str:
    if not _SHA256.fullmatch(artifact.sha256):
        return f"its hash {artifact.sha256!r} is not 64 lower-case hex digits"
    if not 0 <= artifact.size_bytes <= _MAX_FILE_BYTES:
        return f"its size is {artifact.size_bytes} bytes"
    return _name_refusal(artifact.name)


def _name_refusal(name: str) -> str:
    if len(name.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
        return f"the name is longer than {_MAX_NAME_BYTES} bytes"
    if name.startswith("/"):
        return "the name is an absolute path"
    if "\\" in name or ":" in name or not name.isprintable():
        return "the name holds a backslash, a colon or a character that can't be printed"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return 'the name has an empty part, "." or ".."'
    return ""


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
