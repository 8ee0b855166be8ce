"""Which trainable parameters travel in which bucket, and in what order.  [core]

Theory of operation. A bucket is one vector: the gradients of its parameters, flattened and joined in the order of
`names`. Buckets are listed in backward order, so that the first one listed is the first one that can leave. A
transformer block's vector is the nine seed components in wire order; a component may be empty (nothing trainable) or
several parameters (a weight and its bias, or the two halves of a LoRA pair).

This file knows names and element counts, not tensors.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ayni.buckets import BLOCK_COMPONENTS, FLAT, NON_BLOCK_COMPONENTS, Bucket

_BLOCK_PATTERN = re.compile(
    r"(?:^|\.)layers\.(?P<block>\d+)\.(?:"
    r"self_attn\.(?P<attention>[qkvo])_proj|mlp\.(?P<mlp>gate|up|down)_proj"
    r"|(?P<norm>input|post_attention)_layernorm)\."
)
_NON_BLOCK_PATTERN = re.compile(r"(?:^|\.)(?P<component>lm_head|norm|embed_tokens)\.")
_NON_BLOCK_INDEX = {"lm_head": 0, "norm": 1, "embed_tokens": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSpec:
    """One bucket's parameters.

    Attributes:
        bucket: the reduction.
        names: trainable parameters, in vector order.
        sizes: elements of each of them.
        component_sizes: elements of each wire component; empty for one component.
    """

    bucket: Bucket
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    component_sizes: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        """Length of the vector."""
        return sum(self.sizes)

    def slices(self) -> list[tuple[str, slice]]:
        """Returns each parameter's place in the vector."""
        result, start = [], 0
        for name, size in zip(self.names, self.sizes, strict=True):
            result.append((name, slice(start, start + size)))
            start += size
        return result


def flat_layout(sizes: Mapping[str, int]) -> tuple[BucketSpec, ...]:
    """Returns one bucket with all parameters, in the mapping's order."""
    return (BucketSpec(bucket=FLAT, names=tuple(sizes), sizes=tuple(sizes.values())),)


def llama_layout(sizes: Mapping[str, int]) -> tuple[BucketSpec, ...]:
    """Returns the buckets of a Llama-shaped model: one per block and one per non-block component, in backward order.

    Args:
        sizes: elements of each trainable parameter by its transformers (or PEFT) name.

    Raises:
        ValueError: a parameter is no known component.
    """
    members: dict[tuple[Bucket, int], list[str]] = {}
    for name in sizes:
        members.setdefault(_place(name), []).append(name)
    blocks = sorted({bucket.index for bucket, _ in members if bucket.kind == "block"}, reverse=True)
    head, norm, embedding = (Bucket("non_block", index) for index in range(len(NON_BLOCK_COMPONENTS)))
    order = [head, norm, *(Bucket("block", index) for index in blocks), embedding]
    present = {bucket for bucket, _ in members}
    return tuple(_bucket_spec(bucket, members, sizes) for bucket in order if bucket in present)


def check_layout(specs: Sequence[BucketSpec], sizes: Mapping[str, int]) -> None:
    """Refuses a layout that does not hold every trainable parameter exactly once.

    Raises:
        ValueError: names the parameters that are missing, unknown, repeated or of another size.
    """
    placed = [name for spec in specs for name in spec.names]
    problems = [
        *(f"{name} is trainable but in no bucket" for name in sizes if name not in placed),
        *(f"{name} is in a bucket but not trainable" for name in placed if name not in sizes),
        *(f"{name} is in two buckets" for name in _repeated(placed)),
        *(f"{spec.bucket} appears twice" for spec in specs if sum(spec.bucket == other.bucket for other in specs) > 1),
        *(_size_problems(spec, sizes) for spec in specs if _size_problems(spec, sizes)),
    ]
    if not sizes:
        problems = ["there are no trainable parameters"]
    if problems:
        raise ValueError("bucket layout: " + "; ".join(problems))


def _size_problems(spec: BucketSpec, sizes: Mapping[str, int]) -> str:
    wrong = [
        f"{name} has {sizes[name]} elements, the bucket says {size}"
        for name, size in zip(spec.names, spec.sizes, strict=True)
        if name in sizes and sizes[name] != size
    ]
    if spec.component_sizes and sum(spec.component_sizes) != spec.num_elements:
        wrong.append(f"the components of {spec.bucket} add up to {sum(spec.component_sizes)}, not {spec.num_elements}")
    return "; ".join(wrong)


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def _place(name: str) -> tuple[Bucket, int]:
    """Returns the bucket of a parameter and the component inside it."""
    if match := _BLOCK_PATTERN.search(name):
        kind = match["attention"] or match["mlp"] or f"{match['norm']}_norm"
        return Bucket("block", int(match["block"])), BLOCK_COMPONENTS.index(kind)
    if match := _NON_BLOCK_PATTERN.search(name):
        return Bucket("non_block", _NON_BLOCK_INDEX[match["component"]]), 0
    raise ValueError(
        f"parameter {name!r} is none of the nine components of a block ({', '.join(BLOCK_COMPONENTS)}) "
        f"and none of {', '.join(NON_BLOCK_COMPONENTS)}; freeze it, or use the flat layout"
    )


def _bucket_spec(
    bucket: Bucket, members: Mapping[tuple[Bucket, int], Sequence[str]], sizes: Mapping[str, int]
) -> BucketSpec:
    num_components = len(BLOCK_COMPONENTS) if bucket.kind == "block" else 1
    components = [members.get((bucket, component), ()) for component in range(num_components)]
    names = tuple(name for component in components for name in component)
    return BucketSpec(
        bucket=bucket,
        names=names,
        sizes=tuple(sizes[name] for name in names),
        component_sizes=tuple(sum(sizes[name] for name in component) for component in components)
        if bucket.kind == "block"
        else (),
    )
