"""Has the compiled loops used as soon as they are there, without making anybody wait for them.  [shell]

Compiling takes seconds the first time, so it is done on a thread, and numpy's loops run until then. Compiled ones are
used only if they give numpy's bytes on this machine.
"""

import importlib.util
import logging
import os
import threading
import time

from ayni.kernels.current import Kernels, kernels, use
from ayni.kernels.numpy_kernels import NumpyKernels
from ayni.kernels.probe import differing
from ayni.settings import SettingsError

_log = logging.getLogger(__name__)

VARIABLE = "AYNI_KERNELS"
"""Environment variable that chooses the loops of a process."""
CHOICES = ("auto", "compiled", "numpy")
_wanted = ""
"""The last choice, which may have changed while a thread was compiling."""


def choose(choice: str | None = None) -> threading.Thread | None:
    """Chooses the loops of this process; call at its start. Where they are compiled ones already, they stay.

    Args:
        choice: "auto": compiled ones where numba is installed and they prove right, once they are compiled. "compiled":
            the same, but waits for them, and anything else is an error. "numpy". None: what `VARIABLE` says, or "auto".

    Returns:
        The thread that compiles; None where there is nothing to wait for.

    Raises:
        SettingsError: `choice` is none of these, or compiled loops can't be had.
    """
    global _wanted
    choice = choice or os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise SettingsError(f"{VARIABLE} is {choice!r}; it must be one of {', '.join(CHOICES)}")
    _wanted = choice
    if choice == "numpy":
        use(NumpyKernels())
        return None
    if kernels().sums_squares_beside:
        return None
    if choice == "compiled":
        use(compiled())
        return None
    if importlib.util.find_spec("numba") is None:
        _log.info("sums and conversions are numpy's, since numba isn't installed; the extra `fast` makes them quicker")
        return None
    thread = threading.Thread(target=_use_compiled, name="ayni-kernels", daemon=True)
    thread.start()
    return thread


def compiled() -> Kernels:
    """Returns loops that numba compiles, which give numpy's bytes.

    Raises:
        SettingsError: numba is missing, does not work here, or gives other bytes.
    """
    try:
        import numba

        # Python's own loops would give the same bytes, far too slowly.
        if numba.config.DISABLE_JIT:
            raise SettingsError("loops can't be compiled, since NUMBA_DISABLE_JIT is set")
        from ayni.kernels.compiled import CompiledKernels

        found = CompiledKernels()
        others = differing(found, NumpyKernels())
    except ImportError as error:
        raise SettingsError(f"loops can't be compiled ({_sentence(error)}): install the extra `fast`") from error
    except SettingsError:
        raise
    except Exception as error:  # Whatever a compiler can stumble over.
        raise SettingsError(f"loops can't be compiled: {_sentence(error)}") from error
    if others:
        raise SettingsError(f"loops {', '.join(others)}, {found.name}, give other bytes than numpy's on this machine")
    return found


def _use_compiled() -> None:
    begun = time.perf_counter()
    try:
        chosen = compiled()
    except SettingsError as error:
        _log.warning("sums and conversions stay numpy's: %s", error)
        return
    if _wanted == "numpy":
        return
    use(chosen)
    _log.debug("loops are %s, after %.1f s", chosen.name, time.perf_counter() - begun)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
