"""Counts the operations that a GPU engine gives back to the CPU, as the engine's warnings tell of them.  [shell]

Results stay right, but each such operation moves its operands to the CPU and its result back, and waits for both.
"""

import logging
import re
import warnings
from collections import Counter
from typing import TextIO

import torch

_log = logging.getLogger(__name__)

_PATTERN = re.compile(r"(?is).*\bfall(?:ing|s)? back to (?:run on the )?CPU\b")


class FallbackCounter:
    """Takes the warnings of this process that tell of fallbacks out of the stream of warnings, and counts them."""

    def __init__(self) -> None:
        """Begins to count."""
        self.by_kind: Counter[str] = Counter()
        """How often, by the warning's sentence."""
        # Torch would say each only once.
        torch.set_warn_always(True)
        warnings.filterwarnings("always", message=_PATTERN.pattern)
        self._before = warnings.showwarning
        warnings.showwarning = self._show

    @property
    def total(self) -> int:
        """Fallbacks so far."""
        return sum(self.by_kind.values())

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = str(message)
        if not _PATTERN.match(text):
            self._before(message, category, filename, lineno, file, line)
            return
        kind = text.partition(" (Triggered")[0].strip()
        self.by_kind[kind] += 1
        if self.by_kind[kind] == 1:
            _log.warning("runs on the CPU, which is slow; said once, counted in status: %s", kind)
