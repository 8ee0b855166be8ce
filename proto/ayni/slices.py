"""Which part of a bucket which owner reduces.  [core]

A bucket is cut at multiples of `SEGMENT` elements, as evenly as that allows. Where its segments can't be shared out
evenly, the bucket's own number says which owners have one more, so that small buckets spread over all owners. Everybody
computes the same from the same group; nothing of this travels.
"""

from ayni.buckets import NON_BLOCK_COMPONENTS, Bucket
from ayni.reduce.digest import SEGMENT

_FIRST = {"flat": 0, "non_block": 1, "block": 1 + len(NON_BLOCK_COMPONENTS)}
"""Where the numbers of a kind of bucket begin."""


def slice_bounds(num_elements: int, num_owners: int, bucket: Bucket) -> tuple[tuple[int, int], ...]:
    """Returns the elements [start, stop) that each owner reduces, in rank order; empty ones where there are too few.

    The slices follow one another and make up the bucket.

    Args:
        num_elements: of the bucket.
        num_owners: at least 1.
        bucket: names the bucket.
    """
    num_segments = -(-num_elements // SEGMENT)
    each, more = divmod(num_segments, num_owners)
    first = (_FIRST[bucket.kind] + bucket.index) % num_owners
    bounds = []
    start = 0
    for owner in range(num_owners):
        count = each + ((owner - first) % num_owners < more)
        stop = min(start + count * SEGMENT, num_elements)
        bounds.append((start, stop))
        start = stop
    return tuple(bounds)
