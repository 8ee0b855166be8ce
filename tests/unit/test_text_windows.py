"""Windows of token streams: every token but a text's first is predicted exactly once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.tasks.text_windows import IGNORED, TextWindows


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4), context=st.integers(1, 9))
def test_every_token_but_the_first_of_a_text_is_a_target_once(lengths: list[int], context: int) -> None:
    streams = [np.arange(100 * index, 100 * index + length) for index, length in enumerate(lengths)]
    windows = TextWindows(streams, context, num_bytes=1)
    inputs, targets = windows.batch(range(len(windows)))
    seen = targets[targets != IGNORED].tolist()
    assert seen == [token for stream in streams for token in stream[1:].tolist()]
    counted = targets != IGNORED
    assert (inputs[counted] + 1 == targets[counted]).all()
    assert inputs.shape == (len(windows), context)


def test_a_short_last_window_weighs_less() -> None:
    windows = TextWindows([np.arange(6)], 4, num_bytes=12)
    _, targets = windows.batch([0, 1])
    assert (targets != IGNORED).sum(1).tolist() == [4, 1]
    assert windows.tokens_per_byte == 0.5


def test_a_limit_keeps_evenly_spaced_windows() -> None:
    windows = TextWindows([np.arange(101)], 10, num_bytes=100, max_windows=5)
    inputs, _ = windows.batch(range(len(windows)))
    assert inputs[:, 0].tolist() == [0, 20, 40, 60, 80]


@pytest.mark.parametrize(
    "other",
    [
        TextWindows([np.array([1, 2, 3, 4])], 3, 4),
        TextWindows([np.array([1, 2, 3, 5])], 2, 4),
        TextWindows([np.array([1, 2]), np.array([3, 4])], 2, 4),
        TextWindows([np.array([1, 2, 3, 4])], 2, 4, max_windows=1),
    ],
)
def test_hashes_differ_with_context_tokens_texts_and_limit(other: TextWindows) -> None:
    assert TextWindows([np.array([1, 2, 3, 4])], 2, 4).sha256() != other.sha256()


def test_hashes_do_not_depend_on_the_element_type() -> None:
    bytes_, integers = np.array([1, 2, 3], np.uint8), np.array([1, 2, 3], np.int64)
    assert TextWindows([bytes_], 2, 4).sha256() == TextWindows([integers], 2, 4).sha256()
