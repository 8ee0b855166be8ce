"""Pages of a KV cache: where the first and the second agent of `kv_reuse.py` keep keys and values.

A page holds the keys and values of `page_size` tokens, for all layers. A sequence has its pages in any order; its block
table says which. The tensors are registered with the block half as they are: nothing is copied to make them a layout.

Legend: L layers, B blocks, T tokens of a page, H heads, D elements of a head.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash

from ayni.blocks.layouts import LayoutKind
from worker_agent.blocks.device_memory import DeviceMemory
from worker_agent.blocks.host_memory import HostMemory
from worker_agent.blocks.tensors import paged_cache_geometry, register_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class PagesShape:
    """What a paged cache looks like."""

    num_layers: int
    num_blocks: int
    page_size: int
    num_heads: int
    """Heads of keys and values, which may be fewer than those of queries."""
    head_dim: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Pages:
    """One tensor [2, B, T, H, D] for each layer: keys, then values."""

    def __init__(self, shape: PagesShape) -> None:
        self.shape = shape
        size = (2, shape.num_blocks, shape.page_size, shape.num_heads, shape.head_dim)
        self.layers = [torch.zeros(size) for _ in range(shape.num_layers)]

    def as_memory(self) -> HostMemory | DeviceMemory:
        """Returns the pages' own memory, as a layout."""
        geometry = paged_cache_geometry(self.layers, kind=LayoutKind.LAYER_SEPARATE_BLOCK_SECOND)
        return register_tensors(self.layers, geometry)

    def clear(self) -> None:
        """Forgets everything, so that nothing of an earlier sequence can be taken for something onboarded."""
        for layer in self.layers:
            layer.zero_()

    def digests(self, blocks: Sequence[int], rank: int = 0, num_ranks: int = 1) -> list[str]:
        """Returns a checksum of each block, or of those heads that one of several ranks would hold.

        It reads the tensors by their indices and knows nothing of layouts, slices and plans, so that it can judge them.
        """
        width = self.shape.num_heads // num_ranks
        heads = slice(rank * width, (rank + 1) * width)
        parts = (torch.stack([layer[:, block, :, heads] for layer in self.layers]) for block in blocks)
        return [xxhash.xxh3_128_hexdigest(part.numpy().data) for part in parts]
