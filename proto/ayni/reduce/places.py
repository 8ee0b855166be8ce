"""Where means are put together, and what takes them down.  [core]"""

from collections.abc import Callable
from dataclasses import dataclass

from ayni.reduce.digest import MeanDigest
from ayni.tensors import Bytes, Floats, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanPlace:
    """What one bucket's mean is given."""

    new_digest: Callable[[], MeanDigest] = MeanDigest
    """Makes what the chunks are taken down in."""
    mean_N: Floats | None = None  # noqa: N815
    """Where the mean is put together, shape [N], float32; None for anywhere."""
    wire: Bytes | None = None
    """Where the mean lies as it travels: the bytes of `mean_N` where there is one. None for nowhere."""


class Places:
    """Ordinary memory, and digests that are made at once."""

    def take(self, spec: TensorSpec) -> MeanPlace:
        """Returns the place for a bucket's mean."""
        return MeanPlace()
