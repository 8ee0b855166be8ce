"""The run's files, as a task asks for them.  [shell]

The coordinator names files by relative path ("model/config.json"); the worker keeps them in a cache by content, under
other names. `folder` lays a part of them out under their own names again, as links, for libraries that want a folder.
"""

import difflib
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path, PurePosixPath


class RunFiles:
    """Read-only view of the run's files."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Takes local paths by the run's names."""
        self._files = {_checked(name): Path(path) for name, path in files.items()}
        self._staged: dict[str, Path] = {}

    def __contains__(self, name: str) -> bool:
        """Tells whether the run has this file."""
        return name in self._files

    @property
    def names(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted(self._files)

    def path(self, name: str) -> Path:
        """Returns where a file is.

        Raises:
            FileNotFoundError: the run has no such file, or it is gone from this machine.
        """
        if name not in self._files:
            raise FileNotFoundError(f"the run has no file {name!r}{self._hint(name)}")
        if not self._files[name].is_file():
            raise FileNotFoundError(f"file {name!r} of the run is missing on this worker at {self._files[name]}")
        return self._files[name]

    def text(self, name: str) -> str:
        """Returns the text of a UTF-8 file, with its line ends as they are.

        Raises:
            FileNotFoundError: as `path`.
            ValueError: it is not UTF-8.
        """
        try:
            return self.path(name).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"file {name!r} of the run is not UTF-8 text: {error}") from error

    def folder(self, name: str) -> Path:
        """Returns a folder with all files below `name`, under their own names, for as long as this object lives.

        Raises:
            FileNotFoundError: the run has no file below `name`.
        """
        prefix = f"{name.rstrip('/')}/"
        members = [member for member in self._files if member.startswith(prefix)]
        if not members:
            raise FileNotFoundError(f"the run has no folder {name!r}{self._hint(name)}")
        if prefix not in self._staged:
            staged = Path(tempfile.mkdtemp(prefix="ayni-files-"))
            weakref.finalize(self, shutil.rmtree, staged, ignore_errors=True)
            for member in members:
                _link(self.path(member), staged / member.removeprefix(prefix))
            self._staged[prefix] = staged
        return self._staged[prefix]

    def _hint(self, name: str) -> str:
        if not self._files:
            return "; it has no files at all: set `artifacts` in the run file to a folder on the coordinator"
        folders = {f"{PurePosixPath(file).parent}" for file in self._files} - {"."}
        near = difflib.get_close_matches(name, [*self._files, *folders], n=1)
        listed = ", ".join(self.names[:8]) + (", ..." if len(self._files) > 8 else "")
        return f"; did you mean {near[0]!r}? It has: {listed}" if near else f"; it has: {listed}"


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"file name {name!r} must be a relative path without '..'")
    return path.as_posix()


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.symlink(source.resolve(), target)
    except OSError:
        # Some file systems, and Windows without a privilege, refuse links.
        shutil.copyfile(source, target)
