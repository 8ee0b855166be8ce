"""Records as text for a database, and back to the bit.  [core]"""

import json
from dataclasses import asdict
from typing import Any

from coordinator_service.store_records import CommitRecord, Contribution, EpochRecord


def text_of(record: CommitRecord | EpochRecord) -> str:
    """Returns a record as JSON; floats keep every bit, and those that are not finite are kept too."""
    return json.dumps(asdict(record), separators=(",", ":"))


def commit_from(text: str) -> CommitRecord:
    """Returns the commit that `text_of` wrote."""
    values: dict[str, Any] = json.loads(text)
    values["contributions"] = tuple(Contribution(**contribution) for contribution in values["contributions"])
    for name in ("skipped", "left_behind"):
        values[name] = tuple(values[name])
    return CommitRecord(**values)


def epoch_from(text: str) -> EpochRecord:
    """Returns the epoch that `text_of` wrote."""
    values: dict[str, Any] = json.loads(text)
    return EpochRecord(**values | {"worker_names": tuple(values["worker_names"])})
