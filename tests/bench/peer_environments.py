"""Virtual environments of the programs that ours are compared with, each of its own, made the first time."""

import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
CACHE = Path("~/.cache/ayni-peers").expanduser()
_INSTALL_S = 1800.0


class PeerFailed(Exception):
    """A peer could not be installed, or got stuck; says what to look at."""


def environment_of(package: str, cache: Path, others: tuple[str, ...] = (TORCH, "numpy")) -> Path:
    """Returns the Python of a package's own virtual environment below `cache`.

    Args:
        package: what is installed, as "name==version".
        cache: folder of all environments.
        others: what is installed beside it.

    Raises:
        PeerFailed: it can't be installed here.
    """
    folder = cache / package.replace("==", "-")
    python = folder / "bin" / "python"
    done = folder / ".done"
    if not done.exists():
        print(f"installing {package} into {folder}", file=sys.stderr)
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", *others, package],
        ):
            made = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
            if made.returncode:
                raise PeerFailed(f"{package} can't be installed: {made.stderr.strip()[-400:]}")
        done.touch()
    return python
