"""Labelled texts from JSON lines; what is wrong is named with its line."""

import pytest

from worker_agent.tasks.labelled_texts import LabelledText, label_indices, parse_labelled_texts


def texts(*labels: str) -> list[LabelledText]:
    return [LabelledText(text="t", label=label) for label in labels]


def test_lines_become_samples_and_empty_lines_are_passed_over() -> None:
    content = '{"text": "a\\u2028b", "label": "x"}\n\n{"text": "c\u2028d", "label": 3}\n'
    assert parse_labelled_texts(content, "train.jsonl") == [
        LabelledText(text="a\u2028b", label="x"),
        LabelledText(text="c\u2028d", label="3"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "a", "label": "x"}\n{"text": "a"}',
            r'train.jsonl, line 2 must be an object with "text" and "label"',
        ),
        ('{"text": 3, "label": "x"}', "train.jsonl, line 1 must be an object"),
        ("[1]", "train.jsonl, line 1 must be an object"),
        ("\n{oops", "train.jsonl, line 2 is not JSON"),
        ("\n \n", "train.jsonl has no samples"),
    ],
)
def test_anything_else_is_refused_with_its_line(content: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_labelled_texts(content, "train.jsonl")


def test_indices_follow_the_sorted_labels() -> None:
    assert label_indices(texts("b", "a", "b"), texts("a")) == {"a": 0, "b": 1}


def test_one_label_and_unknown_held_out_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have 1 label \(a\); classes need two or more"):
        label_indices(texts("a", "a"), [])
    with pytest.raises(ValueError, match="held-out label 'c' is none of the training labels: a, b"):
        label_indices(texts("a", "b"), texts("c"))
