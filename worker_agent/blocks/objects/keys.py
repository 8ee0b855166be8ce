"""What objects are called in a store.  [core]

`<prefix><layout fingerprint>/<rank>/<text of the sequence hash>`, and the same with `.lock` and `.meta` for the claim
to a key and for the mark that its object is whole. The fingerprint keeps deployments with other models or shapes
apart; the rank keeps the parts of one block apart.
"""

from dataclasses import dataclass

from ayni.blocks.sequence_hash import SequenceHash
from ayni.errors import BadRequest

MAX_NAME_BYTES = 1024
"""Longest name that every kind of store takes."""

MAX_RANK = 65535

_FINGERPRINT_DIGITS = frozenset("0123456789abcdef")
_LONGEST_TAIL = len("/65535/4294967295::.lock") + 2 * len("jpXCZedGfVQ") + 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Shelf:
    """Where the objects of one layout and rank are.

    Raises:
        BadRequest: the fingerprint is not one, or the prefix can't begin a name.
    """

    prefix: str = ""
    fingerprint: str
    """64 hexadecimal digits."""
    rank: int

    def __post_init__(self) -> None:
        """Checks every rule."""
        if len(self.fingerprint) != 64 or not _FINGERPRINT_DIGITS.issuperset(self.fingerprint):
            raise BadRequest(f"{self.fingerprint!r} is not a layout fingerprint: 64 hex digits", field="fingerprint")
        if not 0 <= self.rank <= MAX_RANK:
            raise BadRequest(f"the rank {self.rank} is not between 0 and {MAX_RANK}", field="rank")
        check_prefix(self.prefix)

    def object_name(self, key: SequenceHash) -> str:
        """Returns what the object of a key is called."""
        return f"{self.prefix}{self.fingerprint}/{self.rank}/{key}"

    def lock_name(self, key: SequenceHash) -> str:
        """Returns what the claim to a key is called."""
        return f"{self.object_name(key)}.lock"

    def meta_name(self, key: SequenceHash) -> str:
        """Returns what the mark is called that says that a key's object is whole."""
        return f"{self.object_name(key)}.meta"


def check_prefix(prefix: str) -> None:
    """Refuses prefixes that some kind of store would take for something else.

    Raises:
        BadRequest: the prefix is too long, begins with "/", or has an empty part, ".", ".." or a control character.
    """
    parts = prefix.split("/")
    if not prefix.isprintable() or len(prefix.encode()) > MAX_NAME_BYTES - _LONGEST_TAIL:
        raise BadRequest(f"the prefix {prefix!r} is too long or has control characters", field="prefix")
    if any(part in ("", ".", "..") for part in parts[:-1]) or parts[-1] in (".", ".."):
        raise BadRequest(f"the prefix {prefix!r} has an empty part, '.' or '..'", field="prefix")
