"""Takes, renews and gives back claims to keys, and marks keys whose objects are whole.  [shell]

Beside an object lie up to two more: `.lock`, the claim of whoever is storing it, and `.meta`, empty, which says that it
was stored whole. Nobody needs either to read: objects say themselves whether they are whole.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ayni.blocks.sequence_hash import SequenceHash
from ayni.errors import AyniError, Claimed, StorageFailed
from worker_agent.blocks.objects.claims import Claim, Claimant, decode, successor
from worker_agent.blocks.objects.keys import Shelf
from worker_agent.blocks.objects.store import ObjectStore

_LONGEST_LOCK = 4096
_RELEASE_S = 10.0
"""A claim that is given back must hold for this long still, or be renewed, so that what is deleted is ours."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    claim: Claim | None
    version: str


class KeyLocks:
    """The claims of one process to the keys of one shelf. May be used from several threads."""

    def __init__(
        self,
        store: ObjectStore,
        shelf: Shelf,
        instance_id: str,
        owner: str = "",
        now: Callable[[], float] = time.time,
    ) -> None:
        """Holds nothing yet.

        Args:
            store: where the objects are.
            shelf: which objects.
            instance_id: of the group that claims are made for.
            owner: who makes them; empty: a random text.
            now: seconds since 1970.
        """
        self._store, self._shelf, self._now = store, shelf, now
        self._claimant = Claimant(owner=owner or secrets.token_hex(8), instance_id=instance_id)
        self._pending: set[SequenceHash] = set()
        self._mutex = threading.Lock()

    def is_marked(self, key: SequenceHash) -> bool:
        """Says whether a key's object was stored whole."""
        return self._store.has(self._shelf.meta_name(key)) is not None

    def mark(self, key: SequenceHash) -> None:
        """Says to all that a key's object is whole."""
        self._store.put_if_absent(self._shelf.meta_name(key), memoryview(b""))

    def unmark(self, key: SequenceHash) -> None:
        """Says it no more."""
        self._store.delete(self._shelf.meta_name(key))

    @contextmanager
    def held(self, key: SequenceHash, validity_s: float) -> Iterator[Claim]:
        """Claims a key and gives it back.

        Raises:
            Claimed: another process holds the key, or another call of this one does.
        """
        with self._alone(key):
            claim = self.acquire(key, validity_s)
            try:
                yield claim
            finally:
                self._release_or_tell(key, claim)

    def acquire(self, key: SequenceHash, validity_s: float) -> Claim:
        """Claims a key; the owner of a claim gets it again, with a later deadline.

        Raises:
            Claimed: another process holds the key.
        """
        name = self._shelf.lock_name(key)
        # Twice, since the lock may be given back between the two calls.
        for _ in range(2):
            claim = self._claimant.claim(self._now(), validity_s)
            if self._store.put_if_absent(name, memoryview(claim.encode())):
                return claim
            if found := self._read(key):
                return self._take(key, found, validity_s)
        raise self._claimed(key, None)

    def renew(self, key: SequenceHash, claim: Claim, validity_s: float) -> Claim:
        """Returns the claim with a later deadline.

        Raises:
            Claimed: the claim is no longer this one's.
        """
        found = self._read(key)
        if found is None or not _is_same(found.claim, claim):
            raise self._claimed(key, found.claim if found else None)
        return self._take(key, found, validity_s)

    def release(self, key: SequenceHash, claim: Claim) -> bool:
        """Gives a claim back; says whether it was still this one's. Another's is left as it is."""
        found = self._read(key)
        if found is None or not _is_same(found.claim, claim):
            return False
        if found.claim and found.claim.deadline < self._now() + _RELEASE_S:
            try:
                self.renew(key, claim, _RELEASE_S)
            except Claimed:
                return False
        self._store.delete(self._shelf.lock_name(key))
        return True

    @contextmanager
    def _alone(self, key: SequenceHash) -> Iterator[None]:
        with self._mutex:
            if key in self._pending:
                raise Claimed(
                    f"the key {key} is being stored by another call of this worker; wait for that one",
                    key=key,
                    owner=self._claimant.instance_id,
                )
            self._pending.add(key)
        try:
            yield
        finally:
            with self._mutex:
                self._pending.discard(key)

    def _take(self, key: SequenceHash, found: _Found, validity_s: float) -> Claim:
        claim = successor(found.claim, self._claimant, self._now(), validity_s)
        if claim is None:
            raise self._claimed(key, found.claim)
        if self._store.put_if_match(self._shelf.lock_name(key), memoryview(claim.encode()), found.version):
            return claim
        # Lost, unless only the answer was.
        again = self._read(key)
        if again and again.claim == claim:
            return claim
        raise self._claimed(key, again.claim if again else None)

    def _read(self, key: SequenceHash) -> _Found | None:
        stored = self._store.get(self._shelf.lock_name(key), memoryview(bytearray(_LONGEST_LOCK)))
        return _Found(decode(bytes(stored.data)), stored.version) if stored else None

    def _release_or_tell(self, key: SequenceHash, claim: Claim) -> None:
        try:
            if not self.release(key, claim):
                _log.warning("the claim to %s was taken over before it was given back", key)
        except StorageFailed as error:
            _log.warning("the claim to %s could not be given back and ends by itself: %s", key, error)

    def _claimed(self, key: SequenceHash, holder: Claim | None) -> AyniError:
        who = holder.instance_id if holder else "another group"
        return Claimed(
            f"the key {key} is claimed by {who}, which is storing it; ask later whether it is there",
            key=key,
            owner=who,
        )


def _is_same(found: Claim | None, ours: Claim) -> bool:
    return found is not None and (found.owner, found.fence) == (ours.owner, ours.fence)
