"""Folders that a peer names can't leave the root that the operator gave.  [shell]"""

from pathlib import Path, PurePosixPath

from ayni.errors import BadRequest


def folder_under(root: Path, relative: str, field: str = "disk_folder") -> Path:
    """Returns a folder below a root, with links resolved; it need not exist. An empty name means the root.

    Args:
        root: what must not be left.
        relative: the folder's name, with slashes.
        field: name of the request's field, for the error.

    Raises:
        BadRequest: the name is absolute, has "..", or a link on the way leads out of the root.
    """
    name = PurePosixPath(relative)
    if name.is_absolute() or ".." in name.parts or "\0" in relative:
        raise _outside(relative, field, "it must be a relative path without '..'")
    inside = root.resolve()
    try:
        folder = (inside / name).resolve()
    except (RuntimeError, OSError) as error:
        raise _outside(relative, field, f"it can't be followed: {error}") from None
    if not folder.is_relative_to(inside):
        raise _outside(relative, field, f"a link on the way leads to {folder}")
    return folder


def _outside(relative: str, field: str, detail: str) -> BadRequest:
    return BadRequest(f"the folder {relative!r} is outside the root that this worker was given: {detail}", field=field)
