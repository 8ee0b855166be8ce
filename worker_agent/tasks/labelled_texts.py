"""Texts with labels, from JSON lines.  [core]"""

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledText:
    """One sample."""

    text: str
    label: str


def parse_labelled_texts(content: str, name: str) -> list[LabelledText]:
    """Returns the samples of a JSON-lines file with one {"text": ..., "label": ...} for each line.

    Raises:
        ValueError: names the first line that is something else, or says that there is none.
    """
    samples = [
        _parse_line(line, f"{name}, line {number}")
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    if not samples:
        raise ValueError(f"{name} has no samples")
    return samples


def label_indices(train: Sequence[LabelledText], held_out: Sequence[LabelledText]) -> dict[str, int]:
    """Returns an index for each label of the training samples, in sorted order.

    Raises:
        ValueError: there is one label only, or a held-out sample has a label that training does not.
    """
    labels = sorted({sample.label for sample in train})
    if len(labels) < 2:
        raise ValueError(
            f"the training samples have {len(labels)} label ({', '.join(labels)}); classes need two or more"
        )
    unknown = sorted({sample.label for sample in held_out} - set(labels))
    if unknown:
        raise ValueError(f"held-out label {unknown[0]!r} is none of the training labels: {', '.join(labels)}")
    return {label: index for index, label in enumerate(labels)}


def _parse_line(line: str, where: str) -> LabelledText:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str) or "label" not in value:
        raise ValueError(f'{where} must be an object with "text" and "label"; found {line[:60]!r}')
    return LabelledText(text=value["text"], label=str(value["label"]))
