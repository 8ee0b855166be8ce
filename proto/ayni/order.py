"""Which samples a step uses: a pure function of (seed, position).  [core]

Theory of operation. A run has one endless order of sample positions. Position p belongs to dataset pass p // N and is
sample `permutation(seed, pass, N)[p % N]`. A step takes the next `num_samples` positions, so a step may span two
passes, no pass ever has a short last step, and any machine can name the samples of any step without state.

The permutation sorts N raw 64-bit words of the counter-based Philox generator. Its raw stream is fixed by its authors
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) and does not change between numpy releases, which
the shuffling methods of numpy's Generator do not promise.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt


@lru_cache(maxsize=4)
def permutation(seed: int, dataset_pass: int, num_samples: int) -> npt.NDArray[np.int64]:
    """Returns the order of the samples in one pass, shape [num_samples], int64, read-only."""
    words = np.random.Philox(key=[seed, dataset_pass]).random_raw(num_samples)
    order = np.argsort(words, kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def samples_at(seed: int, start: int, stop: int, num_samples: int) -> npt.NDArray[np.int64]:
    """Returns the samples at positions [start, stop) of the endless order, shape [stop - start], int64.

    Raises:
        ValueError: the range is negative, or there are no samples.
    """
    if num_samples < 1 or not 0 <= start <= stop:
        raise ValueError(f"no samples at positions [{start}, {stop}) of a data set of {num_samples}")
    positions = np.arange(start, stop, dtype=np.int64)
    passes, indices = np.divmod(positions, num_samples)
    result = np.empty_like(positions)
    for dataset_pass in np.unique(passes):
        mask = passes == dataset_pass
        result[mask] = permutation(seed, int(dataset_pass), num_samples)[indices[mask]]
    return result


def microbatch_positions(position: int, num_samples: int, num_microbatches: int, microbatch: int) -> tuple[int, int]:
    """Returns the first and one past the last sample position of a micro-batch.

    Micro-batch m of a step of S samples from position p covers p + floor(m * S / M) up to p + floor((m + 1) * S / M).
    """
    return (
        position + microbatch * num_samples // num_microbatches,
        position + (microbatch + 1) * num_samples // num_microbatches,
    )
