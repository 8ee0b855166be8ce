"""Claims to keys: whose turn it is to store one, decided from what the lock says and the time.  [core]

A claim is a small object beside the one that it is about. It holds until its deadline; then anybody may take it over,
in exchange for the version that was read, so that of several takers one wins. Every takeover counts the fence up by
one: a holder that comes back late sees a higher number than its own and knows that the claim is lost.

What is ugly: clocks of different machines decide. One that is ahead takes claims over too early by as much as it is
ahead, at once if that is their validity. One that is behind waits longer by as much as it is behind; if that is more
than the asker's validity, the claim looks as if it came from a clock gone wrong and is taken at once too. Where it is
too early, two store the same key, and since equal keys mean equal bytes, only the work is wasted.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Who may store a key, and until when. Times are seconds since 1970."""

    owner: str
    """Random text of one process."""
    instance_id: str
    """The owner's group, for people."""
    acquired_at: float
    """When it was taken, or last renewed."""
    deadline: float
    fence: int
    """Counts takeovers, from 1."""

    def encode(self) -> bytes:
        """Returns the lock's content."""
        return json.dumps(asdict(self)).encode()

    def renewed(self, now: float, validity_s: float) -> "Claim":
        """Returns the same owner's claim with a later deadline."""
        return Claim(
            owner=self.owner,
            instance_id=self.instance_id,
            acquired_at=now,
            deadline=now + validity_s,
            fence=self.fence,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimant:
    """Who asks for claims."""

    owner: str
    instance_id: str

    def claim(self, now: float, validity_s: float, fence: int = 1) -> Claim:
        """Returns a claim of this claimant."""
        return Claim(
            owner=self.owner,
            instance_id=self.instance_id,
            acquired_at=now,
            deadline=now + validity_s,
            fence=fence,
        )


def decode(data: bytes) -> Claim | None:
    """Returns the claim that a lock's content stands for; None when it stands for none."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return None
    names = {field.name for field in fields(Claim)}
    if not isinstance(values, dict) or not names <= values.keys() or not _is_sound(values):
        return None
    return Claim(**{name: values[name] for name in names})


def successor(found: Claim | None, claimant: Claimant, now: float, validity_s: float) -> Claim | None:
    """Decides what may be written in place of a lock; None when its owner is to be respected.

    Args:
        found: what the lock says; None when that can't be read, so that nobody's claim is harmed.
        claimant: who asks.
        now: seconds since 1970.
        validity_s: how long the new claim holds, and how long another's is respected at most.
    """
    if found is None:
        return claimant.claim(now, validity_s)
    if found.owner == claimant.owner:
        return found.renewed(now, validity_s)
    if now < min(found.deadline, found.acquired_at + validity_s) and found.acquired_at <= now + validity_s:
        return None
    return claimant.claim(now, validity_s, found.fence + 1)


def _is_sound(values: dict[str, Any]) -> bool:
    numbers = [values["acquired_at"], values["deadline"], values["fence"]]
    return (
        isinstance(values["owner"], str)
        and isinstance(values["instance_id"], str)
        and all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
        and isinstance(values["fence"], int)
        # Neither NaN, which compares with nothing, nor infinity, which would never end.
        and all(abs(number) < 1e15 for number in numbers)
    )
