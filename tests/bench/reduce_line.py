"""What the peers of the all-reduce bench share: a vector, a check of its mean, and turns that the bench calls.

Knows numpy and nothing of Ayni: it runs in the virtual environments of others. A process prints its address, if others
need one, then one JSON object for each line "go" that it is sent.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
TOLERANCE = 1e-5


def arguments() -> argparse.ArgumentParser:
    """The flags that all have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="", help="where the first process is; empty: be it and print it")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True, help="repetitions, with those that don't count")
    return parser


def vector(rank: int, num_elements: int) -> Vector:
    """The gradient of one worker, shape [num_elements]: numbers about 1."""
    return np.random.default_rng(rank).random(num_elements, np.float32) + np.float32(0.5)


def true_mean(workers: int, num_elements: int) -> Vector:
    """The mean of all workers' vectors."""
    total = np.zeros(num_elements)
    for rank in range(workers):
        total += vector(rank, num_elements)
    return (total / workers).astype(np.float32)


def check(mean: Vector, true: Vector) -> float:
    """Returns the largest error of a mean.

    Raises:
        AssertionError: it is too large.
    """
    error = float(np.max(np.abs(mean - true)))
    assert error <= TOLERANCE, f"the mean is off by {error:.3g}"
    return error


def take_turns(turns: int, turn: Callable[[], dict[str, float]]) -> None:
    """Does something each time that the bench says so, and says what came of it."""
    for _ in range(turns):
        if sys.stdin.readline() != "go\n":
            return
        print(json.dumps(turn()), flush=True)


def timed(work: Callable[[], object]) -> float:
    """Returns how long something took, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
