"""Token streams cut into windows for next-token prediction.  [core]

Legend: B windows in a batch, T tokens of context.

Window i of a stream reads tokens [i*T, i*T + T) and predicts each one's successor. The last window of a stream may be
shorter; what is missing is padded with token 0 and its targets are IGNORED, so it weighs less.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]
IGNORED = -100
"""Target that has no loss; torch's cross-entropy skips this value."""


class TextWindows:
    """The windows of some token streams, in order."""

    def __init__(self, streams: Sequence[Tokens], context: int, num_bytes: int, max_windows: int = 0) -> None:
        """Takes one stream for each text; no window spans two.

        Args:
            streams: token ids.
            context: T.
            num_bytes: bytes of all the texts, for bits per byte.
            max_windows: if above 0, keep that many, evenly spaced.
        """
        self._streams = [stream for stream in streams if stream.size > 1]
        self._context = context
        places = [
            (stream, start)
            for stream in range(len(self._streams))
            for start in range(0, self._streams[stream].size - 1, context)
        ]
        if 0 < max_windows < len(places):
            places = [places[index * len(places) // max_windows] for index in range(max_windows)]
        self._places = places
        self.tokens_per_byte = sum(stream.size for stream in streams) / num_bytes if num_bytes else 0.0

    def __len__(self) -> int:
        """Counts the windows."""
        return len(self._places)

    def batch(self, indices: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns inputs and targets of some windows, each shape [B, T], int64."""
        inputs_BT = np.zeros((len(indices), self._context), np.int64)
        targets_BT = np.full((len(indices), self._context), IGNORED, np.int64)
        for row, index in enumerate(indices):
            stream, start = self._places[index]
            tokens = self._streams[stream][start : start + self._context + 1]
            inputs_BT[row, : tokens.size - 1] = tokens[:-1]
            targets_BT[row, : tokens.size - 1] = tokens[1:]
        return inputs_BT, targets_BT

    def sha256(self) -> str:
        """Returns SHA-256 over context length, places and tokens, in hex."""
        digest = hashlib.sha256(np.array([self._context, *np.ravel(self._places)], np.dtype("<i8")).tobytes())
        for stream in self._streams:
            digest.update(np.array([stream.size], np.dtype("<i8")).tobytes())
            digest.update(stream.astype(np.dtype("<i4")).tobytes())
        return digest.hexdigest()
