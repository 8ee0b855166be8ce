"""How long to wait before trying again.  [core]"""

from collections.abc import Callable, Iterator

_FIRST_SECONDS = 0.5
_LONGEST_SECONDS = 4.0


def delays(
    random: Callable[[], float], first: float = _FIRST_SECONDS, longest: float = _LONGEST_SECONDS
) -> Iterator[float]:
    """Yields seconds: twice as long each time up to a limit, between half and all of that by chance.

    The jitter keeps workers that lost the same coordinator from all coming back in the same moment.

    Args:
        random: returns a number in [0, 1).
        first: longest first wait.
        longest: the limit.
    """
    most = first
    while True:
        yield most * (0.5 + 0.5 * random())
        most = min(most * 2, longest)
