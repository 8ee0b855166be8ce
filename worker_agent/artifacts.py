"""The run's files on this machine: fetched once, checked always, shared by all workers of the host.  [shell]

cache/files/<sha256>         a file, complete and read-only
cache/files/<sha256>.part    the beginning of one; a later fetch goes on from its end
cache/files/<sha256>.lock    held while one is being fetched
cache/runs/<hash>/<name>     links to the files, by the names of one run

Content decides: a file is used only after its SHA-256 was computed from what is on the disk. Knows no network: it is
given a function that yields the bytes of a file from an offset on.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import random

from ayni.errors import Checksum, Deadline
from worker_agent.artifact_names import Artifact, check_artifacts
from worker_agent.backoff import delays
from worker_agent.faults import TransportBroken

_log = logging.getLogger(__name__)

Fetch = Callable[[Artifact, int], Generator[tuple[int, bytes]]]
"""Yields (offset, bytes) of a file, from an offset on."""

OnProgress = Callable[[int, int], None]
"""Is told how many bytes are there, and of how many."""

_FRUITLESS_TRIES = 6
_SPARE_BYTES = 64 << 20
"""Left free on the disk, for whatever else the machine does."""
_LOCK_POLL_SECONDS = 0.1


class ArtifactCache:
    """A folder that holds the files of runs."""

    def __init__(self, folder: Path, lock_timeout: timedelta = timedelta(minutes=30)) -> None:
        """Uses a folder, which is made when it is needed.

        Args:
            folder: the cache.
            lock_timeout: longest wait for another process that fetches the same file.
        """
        self._files = folder / "files"
        self._runs = folder / "runs"
        self._lock_timeout = lock_timeout.total_seconds()

    def provide(
        self, artifacts: Sequence[Artifact], fetch: Fetch, on_progress: OnProgress = lambda done, total: None
    ) -> dict[str, Path]:
        """Returns the path of each of a run's files, by name, after fetching what is missing.

        Raises:
            ValueError: the list of files is not acceptable.
            OSError: the disk is full, or the folder can't be written.
            Checksum: what came is not what was announced.
            TransportBroken: the coordinator can't be read from.
            Deadline: another process holds a file for too long.
        """
        check_artifacts(artifacts)
        self._files.mkdir(parents=True, exist_ok=True)
        unique = {artifact.sha256: artifact for artifact in artifacts}
        missing = [artifact for artifact in unique.values() if not self._has(artifact)]
        self._check_space(missing)
        progress = _Sum(sum(artifact.size_bytes for artifact in missing), on_progress)
        for artifact in missing:
            self._obtain(artifact, fetch, progress.tell)
            progress.before += artifact.size_bytes
        return self._view(artifacts)

    def _path(self, artifact: Artifact, suffix: str = "") -> Path:
        return self._files / f"{artifact.sha256}{suffix}"

    def _has(self, artifact: Artifact) -> bool:
        """Returns whether a file is there and whole."""
        path = self._path(artifact)
        return _size(path) == artifact.size_bytes and path.exists() and _sha256(path) == artifact.sha256

    def _check_space(self, missing: Sequence[Artifact]) -> None:
        partial = sum(_size(self._path(artifact, ".part")) for artifact in missing)
        needed = sum(artifact.size_bytes for artifact in missing) - partial
        free = shutil.disk_usage(self._files).free
        if missing and needed + _SPARE_BYTES > free:
            raise OSError(
                f"the run's files need {_megabytes(needed)} more (and {_megabytes(_SPARE_BYTES)} to spare) in "
                f"{self._files}, where {_megabytes(free)} are free: make room, or choose another --cache-dir"
            )

    def _obtain(self, artifact: Artifact, fetch: Fetch, on_progress: Callable[[int], None]) -> None:
        with self._locked(artifact):
            if self._has(artifact):
                return
            if self._path(artifact).exists():
                _log.warning("%s in the cache is damaged and is fetched again", artifact.name)
                self._path(artifact).unlink()
            part = self._path(artifact, ".part")
            resumed = _size(part)
            self._fill(part, artifact, fetch, on_progress)
            if resumed and _sha256(part) != artifact.sha256:
                _log.warning("the beginning of %s from an earlier try is of no use; fetching all of it", artifact.name)
                part.unlink()
                self._fill(part, artifact, fetch, on_progress)
            self._accept(part, artifact)

    def _fill(self, part: Path, artifact: Artifact, fetch: Fetch, on_progress: Callable[[int], None]) -> None:
        """Appends to a beginning until it is as long as announced; goes on after a broken transport."""
        if _size(part) > artifact.size_bytes:
            part.unlink()
        tries = delays(random)
        fruitless = 0
        while True:
            before = _size(part)
            try:
                _append(part, artifact, fetch, on_progress)
                return
            except TransportBroken as error:
                fruitless = 0 if _size(part) > before else fruitless + 1
                if fruitless == _FRUITLESS_TRIES:
                    raise
                tries = tries if fruitless else delays(random)
                delay = next(tries)
                _log.warning("%s at byte %d: %s; going on in %.1f s", artifact.name, _size(part), error, delay)
                time.sleep(delay)

    def _accept(self, part: Path, artifact: Artifact) -> None:
        found = _sha256(part)
        if found != artifact.sha256:
            part.unlink()
            raise Checksum(
                f"{artifact.name} from the coordinator has SHA-256 {found}, but {artifact.sha256} was announced; has "
                "the file changed on the coordinator since it was started?",
                name=artifact.name,
                expected=artifact.sha256,
                received=found,
            )
        part.chmod(0o444)
        part.rename(self._path(artifact))

    def _view(self, artifacts: Sequence[Artifact]) -> dict[str, Path]:
        """Links the files under the run's names; the folder is named by what is in it."""
        listed = "".join(f"{artifact.sha256} {artifact.name}\n" for artifact in sorted(artifacts, key=lambda a: a.name))
        folder = self._runs / hashlib.sha256(listed.encode()).hexdigest()[:16]
        paths = {artifact.name: folder / artifact.name for artifact in artifacts}
        for artifact in artifacts:
            _link(self._path(artifact), paths[artifact.name])
        return paths

    @contextmanager
    def _locked(self, artifact: Artifact) -> Iterator[None]:
        """Keeps other processes from fetching the same file.

        Raises:
            Deadline: another one took too long.
        """
        with self._path(artifact, ".lock").open("a+") as lock:
            end = time.monotonic() + self._lock_timeout
            if not _try_lock(lock.fileno()):
                _log.info("another process on this machine fetches %s; waiting for it", artifact.name)
                # flock has no deadline of its own, so it is asked again and again.
                while not _try_lock(lock.fileno()):
                    if time.monotonic() > end:
                        raise _lock_deadline(artifact, lock.name, self._lock_timeout)
                    time.sleep(_LOCK_POLL_SECONDS)
            yield


@dataclass(slots=True)
class _Sum:
    """Adds the bytes of the files before to those of the file in progress."""

    total: int
    on_progress: OnProgress
    before: int = 0

    def tell(self, here: int) -> None:
        self.on_progress(self.before + here, self.total)


def _append(part: Path, artifact: Artifact, fetch: Fetch, on_progress: Callable[[int], None]) -> None:
    """Fetches what a beginning lacks (one copy)."""
    position = _size(part)
    if position and position == artifact.size_bytes:
        return
    with part.open("ab", buffering=0) as file, closing(fetch(artifact, position)) as pieces:
        for offset, data in pieces:
            if offset != position or position + len(data) > artifact.size_bytes:
                raise Checksum(
                    f"{artifact.name}: bytes {offset} to {offset + len(data)} came where byte {position} of "
                    f"{artifact.size_bytes} was expected",
                    name=artifact.name,
                )
            _write(file.fileno(), data, f"{artifact.name} to {part}")
            position += len(data)
            on_progress(position)
        os.fsync(file.fileno())
    if position != artifact.size_bytes:
        raise TransportBroken(f"the bytes ended at {position} of {artifact.size_bytes}")


def _write(descriptor: int, data: bytes, what: str) -> None:
    """Writes all bytes.

    Raises:
        OSError: the disk is full or broken; names the file.
    """
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError as error:
        raise OSError(error.errno, f"can't write {what}: {error.strerror}") from error


def _link(source: Path, target: Path) -> None:
    """Makes `target` a link to `source`, whatever is there; a symbolic one where the disk knows no other."""
    if target.exists() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name[:64]}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        fresh.hardlink_to(source)
    except OSError:
        fresh.symlink_to(source.resolve())
    fresh.replace(target)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_deadline(artifact: Artifact, lock: str, seconds: float) -> Deadline:
    what = f"another process on this machine that fetches {artifact.name} (it holds {lock})"
    return Deadline(f"waited {seconds:g} s in vain for {what}", waiting_for=what, timeout=seconds)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
