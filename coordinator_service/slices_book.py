"""What the owners took down of the slices of one attempt: whether it makes up every bucket; norm and hash.  [core]

An owner says it once, when it commits. Nobody else has the mean of its slice in a form that can be checked, so what is
checked is the shape: that each owner says something of its own slices, all of them and no others. Every owner says how
long the whole bucket is, so that a slice which is short or in the wrong place is refused at once, and one that never
came is missed, the last one too. Of owners that don't say it, a bucket is as long as where its last slice ends.
"""

import math
from collections.abc import Sequence

import xxhash

from ayni.buckets import Bucket
from ayni.errors import BadRequest, NotLeased, SpecMismatch
from ayni.reduce.digest import DIGEST_BYTES, SEGMENT, join_digests
from ayni.slices import slice_bounds
from ayni.step_values import ExchangeGroup, GroupMember, SliceDigest

_LARGEST = 1 << 40
"""Most elements of a slice."""
_MOST_SQUARES = 64
"""Most floats of an expansion: those of float64 without overlap are 40 at most."""


class SlicesBook:
    """Slices of one attempt under one generation."""

    def __init__(self, label: str, group: ExchangeGroup) -> None:
        """Starts empty; `label` names the step in errors."""
        self._label = label
        self._owners = group.owners if group.topology == "sharded" else group.members[:1]
        self._taken: dict[int, dict[Bucket, SliceDigest]] = {}

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets of which anything was said, in order."""
        return sorted({bucket for taken in self._taken.values() for bucket in taken})

    @property
    def num_elements(self) -> int:
        """Elements of all slices so far."""
        return sum(one.num_elements for taken in self._taken.values() for one in taken.values())

    @property
    def gradient_hash(self) -> str:
        """XXH3-128 in hex over all buckets' names and hashes, in the order of the buckets; empty without buckets."""
        whole = xxhash.xxh3_128()
        for bucket in self.buckets:
            whole.update(f"{bucket} {join_digests(one.digests for one in self._slices(bucket))}\n".encode())
        return whole.hexdigest() if self.buckets else ""

    def gradient_norm(self) -> float:
        """Returns the Euclidean norm of the mean over all buckets: each bucket's sum rounded once, as in a round."""
        sums = [math.fsum(part for one in self._slices(bucket) for part in one.squares) for bucket in self.buckets]
        return math.sqrt(math.fsum(sums))

    def take_down(self, worker_id: int, slices: Sequence[SliceDigest]) -> None:
        """Notes what a worker says of its slices; all of it, or nothing if it is refused.

        Raises:
            NotLeased: it owns none.
            BadRequest: a slice is impossible, or comes twice.
            SpecMismatch: it is not the worker's whole slice of such a bucket, or another owner says another length.
        """
        if not slices:
            return
        if all(owner.worker_id != worker_id for owner in self._owners):
            owners = ", ".join(owner.worker_name for owner in self._owners)
            raise NotLeased(
                f"{self._label}: worker {worker_id} reports slices and owns none; the owners are {owners}",
                lease=owners,
                contributed=f"{len(slices)} slices",
            )
        taken: dict[Bucket, SliceDigest] = {}
        for one in slices:
            self._check(one, taken)
            self._check_place(worker_id, one)
            taken[one.bucket] = one
        self._taken[worker_id] = taken

    def check_whole(self, num_buckets: int) -> None:
        """Refuses slices that are not those of the owners in force.

        Raises:
            SpecMismatch: they do not make up so many buckets, each from its first element to its last.
        """
        if len(self.buckets) != num_buckets:
            said = ", ".join(str(bucket) for bucket in self.buckets) or "none"
            raise self._mismatch("num_buckets", num_buckets, len(self.buckets), f"slices of {said} were taken down")
        for bucket in self.buckets:
            expected = slice_bounds(self._length(bucket), len(self._owners), bucket)
            found = [self._bounds(bucket, owner) for owner in self._owners]
            if found != [(start, stop) if stop > start else None for start, stop in expected]:
                pairs = zip(self._owners, found, strict=True)
                detail = ", ".join(f"{owner.worker_name} took down {bounds or 'nothing'}" for owner, bounds in pairs)
                raise self._mismatch("slices", expected, found, f"of {bucket} {detail}")

    def _length(self, bucket: Bucket) -> int:
        """Returns a bucket's elements: as it was said, or as far as slices go."""
        said = [one.bucket_elements for one in self._slices(bucket)]
        return max(said) or max(one.first_element + one.num_elements for one in self._slices(bucket))

    def _check_place(self, worker_id: int, one: SliceDigest) -> None:
        """Refuses what is not the worker's slice of a bucket of that length, or where another owner says another."""
        if not one.bucket_elements:
            return
        for other in self._owners:
            said = self._taken.get(other.worker_id, {}).get(one.bucket)
            if said and other.worker_id != worker_id and said.bucket_elements not in (0, one.bucket_elements):
                detail = f"{other.worker_name} and {self._name(worker_id)} reduce slices of {one.bucket}"
                raise self._mismatch("bucket_elements", said.bucket_elements, one.bucket_elements, detail)
        ranks = [owner.worker_id for owner in self._owners]
        own = slice_bounds(one.bucket_elements, len(ranks), one.bucket)[ranks.index(worker_id)]
        found = (one.first_element, one.first_element + one.num_elements)
        if found != own:
            detail = f"of {one.bucket}, which has {one.bucket_elements} elements, {self._name(worker_id)} took it down"
            raise self._mismatch("slice", own, found, detail)

    def _name(self, worker_id: int) -> str:
        return next(owner.worker_name for owner in self._owners if owner.worker_id == worker_id)

    def _bounds(self, bucket: Bucket, owner: GroupMember) -> tuple[int, int] | None:
        """Returns the elements that an owner has taken down of a bucket, or None."""
        one = self._taken.get(owner.worker_id, {}).get(bucket)
        return (one.first_element, one.first_element + one.num_elements) if one else None

    def _slices(self, bucket: Bucket) -> list[SliceDigest]:
        found = [taken[bucket] for taken in self._taken.values() if bucket in taken]
        return sorted(found, key=lambda one: one.first_element)

    def _check(self, one: SliceDigest, taken: dict[Bucket, SliceDigest]) -> None:
        if one.bucket in taken:
            raise self._bad(one, "it comes twice")
        largest = max(one.num_elements, one.first_element, one.bucket_elements)
        if not one.num_elements or largest > _LARGEST or one.first_element % SEGMENT:
            raise self._bad(one, f"a slice has 1 to {_LARGEST} elements from a multiple of {SEGMENT} on")
        expected = -(-one.num_elements // SEGMENT) * DIGEST_BYTES
        if len(one.digests) != expected:
            raise self._bad(one, f"it has {len(one.digests)} bytes of digests, not {expected}")
        if len(one.squares) > _MOST_SQUARES or not all(math.isfinite(part) for part in one.squares):
            raise self._bad(one, f"its squares must be at most {_MOST_SQUARES} finite floats")

    def _bad(self, one: SliceDigest, why: str) -> BadRequest:
        stop = one.first_element + one.num_elements
        sentence = f"{self._label}: slice [{one.first_element}, {stop}) of {one.bucket} is refused: {why}"
        return BadRequest(sentence, field="slices")

    def _mismatch(self, field: str, expected: object, received: object, detail: str) -> SpecMismatch:
        return SpecMismatch(
            f"{self._label}: {field} is {received}; {expected} is expected: {detail}",
            field=field,
            expected=expected,
            received=received,
            bucket=", ".join(str(bucket) for bucket in self.buckets),
        )
