"""One bucket of one attempt of a step: chunks in, chunks of the weighted mean out.  [core]

Legend: N elements in the bucket, C elements in a chunk, M micro-batches in the step.

Theory of operation. A round is *open* until every expected lease has begun and every micro-batch is declared, then it
*reduces*, and it is *complete* when all N elements of the mean were emitted. Under each lease come, for each of its
parts (nodes of the canonical tree, see `ayni.tree`), chunks in offset order. For each chunk position, the two halves of
a tree node are added as soon as both are there, in float32, left plus right. When the root is there, it is divided once
by the total weight. The tree fixes every addition, so the bytes of the mean are a function of the micro-batches'
gradients alone: not of who computed them, how many workers there were, when frames came or how long chunks are.

A part of weight 0 is absent (see `ayni.tree`) and sends nothing. With a total weight of 0 nothing is emitted.

What is held is only what can't be added yet; `backlog` tells the shell when to stop reading from a fast worker.

When a lease ends early, `drop` says what becomes of its contribution: what is there whole stays, what has no byte is
removed. A part can't be taken out of a sum again: then the round must `restart`, and everybody contributes once more.

Knows no lease beyond a number and a name, no wire and no clock. Ugly: emission may happen in `begin` and `drop` too,
when the last expected lease begins, or goes, after the last byte came.
"""

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ayni.errors import SpecMismatch
from ayni.reduce.digest import MeanDigest
from ayni.reduce.mean_writer import MeanWriter, Reduced
from ayni.reduce.packed import Values, add, floats, is_finite
from ayni.reduce.places import MeanPlace
from ayni.reduce.refusals import bad_chunk, duplicate, not_finite
from ayni.tensors import Bytes, Floats, TensorSpec
from ayni.tree import Node, children, cover, parent, root


class Fate(enum.Enum):
    """What becomes of a contribution whose lease ends early."""

    KEPT = "kept"
    REMOVED = "removed"
    PARTIAL = "partial"


@dataclass(kw_only=True, slots=True)
class _Contribution:
    name: str
    start: int
    stop: int
    parts: list[Node]
    next_offsets: list[int]
    is_settled: bool = False
    """Whether its lease is over and it stays."""
    is_held: bool = False
    """Whether its micro-batches came with another lease before."""


class Round:
    """Reduces one bucket. Call from one task at a time; every method is plain computation."""

    def __init__(
        self,
        *,
        label: str,
        spec: TensorSpec,
        num_microbatches: int,
        chunk_elements: int,
        expected: Iterable[int],
        place: MeanPlace | None = None,
    ) -> None:
        """Opens the round.

        Args:
            label: names step and bucket in errors, such as "step 3, block 2".
            spec: tensor of the first contribution; all others must be equal.
            num_microbatches: M.
            chunk_elements: length of every chunk but a part's last.
            expected: leases that must begin before anything is emitted: those whose workers receive the mean.
            place: where the mean is put together and taken down; None for anywhere.
        """
        self.label = label
        self.spec = spec
        self.held_bytes = 0
        """Bytes that wait to be added."""
        self._spec_of = ""
        """Worker that said first what the tensor looks like."""
        self._root = root(num_microbatches)
        self.chunk_elements = chunk_elements
        self.mean = MeanWriter(label, place or MeanPlace())
        self.restart(expected)

    def restart(self, expected: Iterable[int]) -> None:
        """Drops everything that was contributed; all leases begin again."""
        self.held_bytes = 0
        self._expected = set(expected)
        self._weights: dict[int, int] = {}
        self._total_weight = 0
        self._contributions: dict[int, _Contribution] = {}
        self._pending: dict[int, dict[Node, Values]] = {}
        """For each chunk position (its first element), the sums that wait for their other half."""
        self.mean.restart()

    @property
    def mean_N(self) -> Floats | None:  # noqa: N802
        """Where the mean is put together, shape [N], float32; None for anywhere."""
        return self.mean.place.mean_N

    @property
    def wire(self) -> Bytes | None:
        """Where the mean lies as it travels; None for nowhere."""
        return self.mean.place.wire

    @property
    def open_for(self) -> list[int]:
        """Expected leases that have not begun."""
        return sorted(self._expected - self._contributions.keys())

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Micro-batches [start, stop) that are declared, one range for each contribution."""
        return [(c.start, c.stop) for c in self._contributions.values() if not c.is_held]

    @property
    def digest(self) -> str:
        """The hash in hex of the mean that was emitted so far; see `ayni.reduce.digest`."""
        return self.taken_down().hexdigest()

    def taken_down(self) -> MeanDigest:
        """Returns what was taken down of the mean that was emitted so far; where nothing weighs anything, of zeros."""
        if self._declared and self.total_weight == 0 and not self.emitted:
            self.mean.take_down_zeros(self.spec.num_elements)
        return self.mean.digest

    def has_begun(self, lease: int) -> bool:
        """Returns whether a lease's contribution has begun."""
        return lease in self._contributions

    @property
    def is_empty(self) -> bool:
        """Returns whether no contribution has begun."""
        return not self._contributions

    def is_held(self, lease: int) -> bool:
        """Returns whether nothing is to be sent under a lease that has begun: its micro-batches came before."""
        return self._contributions[lease].is_held

    @property
    def total_weight(self) -> int:
        """Sum of the weights that were declared."""
        return self._total_weight

    @property
    def emitted(self) -> int:
        """Elements of the mean that were emitted."""
        return self.mean.emitted

    @property
    def complete(self) -> bool:
        """Whether the whole mean was emitted, or there is nothing to emit."""
        return self._declared and (self.total_weight == 0 or self.emitted == self.spec.num_elements)

    @property
    def num_contributors(self) -> int:
        """Contributions with at least one micro-batch."""
        return sum(bool(contribution.parts) for contribution in self._contributions.values())

    @property
    def square_sum(self) -> float:
        """Sum of the squares of the emitted mean, exactly rounded from float64 sums over fixed segments."""
        return self.mean.digest.square_sum()

    @property
    def _declared(self) -> bool:
        return len(self._weights) == self._root.stop and self._expected <= self._contributions.keys()

    def begin(self, lease: int, name: str, spec: TensorSpec, weights: dict[int, int]) -> list[Reduced]:
        """Declares one lease's micro-batches. Those that an ended lease left whole are not asked for again.

        Args:
            lease: begins once.
            name: names its worker in errors.
            spec: what each of its parts looks like.
            weights: weight of each of its micro-batches, a contiguous run; empty for none.

        Returns:
            What became complete: only when this was the last declaration.

        Raises:
            SpecMismatch: another tensor than the round's.
            Duplicate: the lease has begun, or a micro-batch is declared by another.
        """
        if lease in self._contributions:
            raise duplicate(self.label, name, weights)
        is_held = self.check(lease, name, spec, weights)
        self._spec_of = self._spec_of or name
        start, stop = (min(weights), max(weights) + 1) if weights else (0, 0)
        parts = cover(start, stop, self._root.stop) if weights and not is_held else []
        self._contributions[lease] = _Contribution(
            name=name, start=start, stop=stop, parts=parts, next_offsets=[0] * len(parts), is_held=is_held
        )
        if not is_held:
            self._weights.update(weights)
            self._total_weight += sum(weights.values())
        if not (self._declared or any(self._absent(part) for part in parts)):
            return []
        return self._settle()

    def check(self, lease: int, name: str, spec: TensorSpec, weights: dict[int, int]) -> bool:
        """Refuses what `begin` would, once what the lease itself contributed before was dropped; changes nothing.

        Returns:
            Whether the micro-batches came already, with leases that have ended.

        Raises:
            SpecMismatch, Duplicate: see `begin`.
        """
        self._check_spec(name, spec)
        own = self._contributions.get(lease)
        before = range(own.start, own.stop) if own and not own.is_held else range(0)
        known = {microbatch for microbatch in self._weights.keys() & weights.keys() if microbatch not in before}
        is_held = bool(weights) and len(known) == len(weights) and self._is_settled(min(weights), max(weights) + 1)
        if known and not is_held:
            raise duplicate(self.label, name, weights)
        return is_held

    def drop(self, lease: int, *, is_over: bool = True) -> tuple[Fate, list[Reduced]]:
        """Takes a contribution out as far as that is possible.

        Args:
            lease: may not have begun.
            is_over: whether the lease has ended; otherwise it is expected to begin again.

        Returns:
            What became of it, and what became complete because nobody waits for it any more. After PARTIAL the round
            has to be restarted.
        """
        if is_over:
            self._expected.discard(lease)
        contribution = self._contributions.get(lease)
        if contribution and not is_over and (any(contribution.next_offsets) or self.emitted):
            return Fate.PARTIAL, []
        if contribution and any(contribution.next_offsets) and not self.finished_sending(lease):
            return Fate.PARTIAL, []
        if contribution and is_over and contribution.parts and self.finished_sending(lease):
            contribution.is_settled = True
            return Fate.KEPT, self._settle() if self._declared else []
        if contribution:
            del self._contributions[lease]
            if not contribution.is_held:
                for microbatch in range(contribution.start, contribution.stop):
                    self._total_weight -= self._weights.pop(microbatch)
        return Fate.REMOVED, self._settle() if self._declared else []

    def is_due(self, parts: Collection[tuple[int, int]]) -> bool:
        """Returns whether these parts, as (lease, part), each once, are all that the mean's next chunks are made of."""
        if not self._declared or self._pending:
            return False
        present = {
            (lease, part)
            for lease, contribution in self._contributions.items()
            for part, node in enumerate(contribution.parts)
            if not self._absent(node)
        }
        return bool(present) and len(parts) == len(present) and present == set(parts)

    def contribute_runs(self, runs: Sequence[tuple[int, int, Floats]]) -> Reduced:
        """Adds several chunks at once of all parts, which `is_due`, and returns what they make up.

        Args:
            runs: lease, part and values of each, from the mean's next element on; all of one length, in whole chunks.
                Nobody has looked for what is not finite: see `contribute`.

        Raises:
            NonFinite: the sum of all is not finite. The round has to be restarted.
        """
        offset, found = self.emitted, None
        for lease, part, values_R in runs:
            contribution = self._contributions[lease]
            contribution.next_offsets[part] += values_R.size
            found = self._add(offset, contribution.parts[part], values_R)
        assert found is not None, "runs of all parts make up a mean"
        return found

    def contribute(self, lease: int, part: int, offset: int, values_C: Values, *, check: bool = True) -> list[Reduced]:
        """Adds one chunk of one part and returns what became complete.

        Args:
            lease: has begun.
            part: index into the lease's parts.
            offset: first element, equal to the elements this part has contributed so far.
            values_C: shape [C], float32, or as they travel. Kept, not copied; the caller must not change it
                afterwards. Added in place when it is writable.
            check: whether to look for what is not finite now. Otherwise the sum of all shows that there is something,
                and the caller, who has all contributions, has to find whose it is.

        Returns:
            Zero or one Reduced. Bit-identical for every order of arrival.

        Raises:
            BadChunk: wrong part, offset or length. Nothing was added.
            NonFinite: a NaN or an infinity, and nothing was added; or the sum of all overflows.
        """
        contribution = self._contributions[lease]
        self._check_chunk(contribution, part, offset, values_C)
        if check and not is_finite(values_C):
            raise not_finite(self.label, contribution.name, offset, floats(values_C))
        contribution.next_offsets[part] += values_C.size
        result = self._add(offset, contribution.parts[part], values_C)
        return [] if result is None else [result]

    def backlog(self, lease: int) -> int:
        """Returns how many chunk positions this lease is ahead of the emitted mean."""
        contribution = self._contributions.get(lease)
        if contribution is None:
            return 0
        ahead = max(contribution.next_offsets, default=0) - self.emitted
        return max(0, -(-ahead // self.chunk_elements))

    def finished_sending(self, lease: int) -> bool:
        """Returns whether every part of weight above 0 has come whole."""
        contribution = self._contributions.get(lease)
        if contribution is None:
            return False
        sent = zip(contribution.parts, contribution.next_offsets, strict=True)
        return all(offset == self.spec.num_elements or self._absent(node) for node, offset in sent)

    def _check_spec(self, name: str, spec: TensorSpec) -> None:
        for attribute in ("dtype", "num_elements", "component_sizes"):
            expected, received = getattr(self.spec, attribute), getattr(spec, attribute)
            if expected != received:
                raise SpecMismatch(
                    f"{self.label}: worker {name} contributes {attribute} {received}, the round has {expected} since "
                    f"worker {self._spec_of} began it; do all workers train the same model?",
                    field=attribute,
                    expected=expected,
                    received=received,
                    bucket=self.label,
                )

    def _check_chunk(self, contribution: _Contribution, part: int, offset: int, values_C: Values) -> None:
        if not part < len(contribution.parts) or self._absent(contribution.parts[part]):
            raise bad_chunk(
                self.label, contribution.name, "part", f"one with weight, of {len(contribution.parts)}", part
            )
        if offset != contribution.next_offsets[part]:
            raise bad_chunk(self.label, contribution.name, "offset", contribution.next_offsets[part], offset)
        length = min(self.chunk_elements, self.spec.num_elements - offset)
        if values_C.size != length or length == 0:
            raise bad_chunk(self.label, contribution.name, "length", length, values_C.size)

    def _is_settled(self, start: int, stop: int) -> bool:
        """Returns whether contributions that stay, of leases that are over, cover [start, stop)."""
        settled = [c for c in self._contributions.values() if c.is_settled]
        return all(any(c.start <= m < c.stop for c in settled) for m in range(start, stop))

    def _absent(self, node: Node) -> bool:
        """Returns whether a node is known to send nothing. A micro-batch that nobody declared yet may still send."""
        return not any(self._weights.get(m, 1) for m in range(node.start, node.stop))

    def _settle(self) -> list[Reduced]:
        """Tries every held sum again, since more is known about who sends nothing."""
        emitted = []
        for offset in sorted(self._pending):
            for node, values in list(self._pending[offset].items()):
                if offset in self._pending and self._take(offset, node) is not None:
                    emitted.append(self._add(offset, node, values))
        return [reduced for reduced in emitted if reduced is not None]

    def _take(self, offset: int, node: Node) -> Values | None:
        pending = self._pending.get(offset)
        values = pending.pop(node, None) if pending else None
        if values is not None:
            self.held_bytes -= values.nbytes
        return values

    def _add(self, offset: int, node: Node, values: Values) -> Reduced | None:
        """Climbs the tree from `node` as far as sums are there; emits at the root."""
        while node != self._root:
            above = parent(node, self._root.stop)
            left, right = children(above) or (node, node)
            other = self._take(offset, right if node == left else left)
            if other is not None and above == self._root and self._declared:
                return self._emit(offset, values, other)
            if other is not None:
                values = add(values, other) if node == left else add(other, values)
            elif not self._absent(right if node == left else left):
                break
            node = above
        if node == self._root and self._declared:
            return self._emit(offset, values)
        self._pending.setdefault(offset, {})[node] = values
        self.held_bytes += values.nbytes
        return None

    def _emit(self, offset: int, values_C: Values, other_C: Values | None = None) -> Reduced:
        """Emits the root: one sum, or two that are still to be added."""
        self._pending.pop(offset, None)
        return self.mean.write(offset, values_C, other_C, self.total_weight)
