"""Names of the reductions of a step.  [core]"""

from dataclasses import dataclass

BLOCK_COMPONENTS = ("q", "k", "v", "o", "gate", "up", "down", "input_norm", "post_attention_norm")
"""The nine components of a transformer block, in wire order."""

NON_BLOCK_COMPONENTS = ("lm_head", "final_norm", "embedding")
"""The components outside the blocks; the index is the component's number in Python."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """One reduction of a step.

    Attributes:
        kind: "flat", "block" or "non_block".
        index: block index, or index into NON_BLOCK_COMPONENTS; 0 for "flat".
    """

    kind: str
    index: int = 0

    def __str__(self) -> str:
        """Text for people, such as "block 3" or "lm_head"."""
        if self.kind == "non_block":
            return NON_BLOCK_COMPONENTS[self.index]
        return f"block {self.index}" if self.kind == "block" else self.kind


FLAT = Bucket("flat")
"""The flat vector: LoRA parameters, then the head."""
