"""Files of what rounding keeps back: a few steps' residuals, beside a worker's checkpoints.  [shell]

Every worker writes its own, in a folder that is named after it, and goes on from them when it is started again under
that name at a step that it has a file of. A file says which parameters it belongs to, by their hash; without a fitting
one a worker begins with zeros, which costs a rounding and no more. So a file that can't be written or read is said, and
ends nothing. No pickle.
"""

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ayni.buckets import Bucket
from worker_agent.session import Vector

log = logging.getLogger(__name__)

FORMAT = "ayni-residuals-1"
FOLDER = "residuals"
_SUFFIX = ".safetensors"
_MOST_KEPT = 3
"""Files of one worker, the newest ones; each takes as much room as a gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnwrittenResiduals:
    """Residuals that belong to the parameters after a step; copies."""

    completed_steps: int
    parameters_sha256: str
    residuals: Mapping[Bucket, Vector]

    def write(self, checkpoints: Path) -> Path | None:
        """Writes them to the disk, drops the oldest files, and returns the file; None if it can't be written."""
        folder = checkpoints / FOLDER
        path = folder / f"{self.completed_steps}{_SUFFIX}"
        partial = folder / f".{path.name}.partial"
        facts = {"format": FORMAT, "parameters_sha256": self.parameters_sha256}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({str(bucket): values for bucket, values in self.residuals.items()}, partial, facts)
            _sync(partial)
            partial.replace(path)
            _sync(folder)
            _prune(folder)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            log.warning(
                "residuals after step %d were not written on this worker, in %s: %s; started again at that step, it "
                "begins with zeros. Free some space or choose another checkpoint folder",
                self.completed_steps,
                folder,
                error,
            )
            return None
        return path


def load(
    checkpoints: Path, completed_steps: int, parameters_sha256: str, num_elements: Mapping[Bucket, int]
) -> dict[Bucket, Vector] | None:
    """Returns the residuals that belong to parameters, or None where there are none.

    Args:
        checkpoints: the folder that they were written beside.
        completed_steps: updates that the parameters have had.
        parameters_sha256: hash of the parameters.
        num_elements: N of each bucket.
    """
    path = checkpoints / FOLDER / f"{completed_steps}{_SUFFIX}"
    if not path.is_file():
        log.info("no residuals of step %d in %s: they begin with zeros", completed_steps, path.parent)
        return None
    try:
        residuals = _read(path, parameters_sha256, num_elements)
    except (OSError, SafetensorError, ValueError) as error:
        log.warning("residuals in %s are of no use on this worker: %s; they begin with zeros", path, error)
        return None
    log.info("going on with the residuals in %s", path)
    return residuals


def _read(path: Path, parameters_sha256: str, num_elements: Mapping[Bucket, int]) -> dict[Bucket, Vector]:
    with safe_open(path, framework="np") as file:
        facts = file.metadata() or {}
        if facts.get("format") != FORMAT:
            raise ValueError(f"their format is {facts.get('format')!r}; this program reads {FORMAT!r}")
        if facts.get("parameters_sha256") != parameters_sha256:
            raise ValueError(
                f"they belong to parameters {facts.get('parameters_sha256', '')[:12] or '(unknown)'}, and this worker "
                f"has {parameters_sha256[:12]}"
            )
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        expected = {str(bucket): (count,) for bucket, count in num_elements.items()}
        if found != expected:
            raise ValueError(f"they have shapes {found}; this worker's buckets have {expected}")
        residuals = {bucket: file.get_tensor(str(bucket)) for bucket in num_elements}
    for bucket, values in residuals.items():
        if values.dtype != np.float32 or not np.isfinite(values).all():
            raise ValueError(f"those of {bucket} are not finite float32 numbers")
    return residuals


def _prune(folder: Path) -> None:
    files = [path for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal()]
    for path in sorted(files, key=lambda path: int(path.stem))[:-_MOST_KEPT]:
        path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
