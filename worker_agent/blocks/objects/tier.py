"""Blocks as objects: whether they are stored, storing, loading and removing them.  [shell]

Legend: n bytes of a block.

Copies: one on the way out (block to object), one on the way in (object to block, once the object has been checked), and
those of the store. A block is touched only for as long as its copy takes, never while the store is waited for.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from ayni.blocks.ids import Ids
from ayni.blocks.objects import KeyOutcome, OutcomeState, Presence, PresenceState
from ayni.blocks.sequence_hash import SequenceHash
from ayni.blocks.transfers import Failure
from ayni.errors import AyniError, BadRequest, IncompatibleLayout, StorageFailed, TooLarge
from worker_agent.blocks.memory import WHOLE, Bytes, Memory
from worker_agent.blocks.objects.batch import Batch
from worker_agent.blocks.objects.keys import Shelf
from worker_agent.blocks.objects.locks import KeyLocks
from worker_agent.blocks.objects.object_format import (
    HEADER_BYTES,
    Flaw,
    Identity,
    failure_of,
    flaw_of,
    flaw_of_size,
    refusal_of,
    write_header,
)
from worker_agent.blocks.objects.store import Asked, ObjectStore, Stored

DEFAULT_REQUESTS = 16

_LONGEST_VALIDITY_S = 1e12
"""So that the deadline of a claim stays a number that others take for one."""

_log = logging.getLogger(__name__)


class ObjectTier:
    """The objects of one layout and rank in one store. Methods return at once; await what they return."""

    def __init__(
        self,
        store: ObjectStore,
        shelf: Shelf,
        block_bytes: int,
        instance_id: str,
        max_requests: int = DEFAULT_REQUESTS,
    ) -> None:
        """Takes a store, which stays its opener's.

        Args:
            store: where objects are.
            shelf: which of them are meant.
            block_bytes: n.
            instance_id: of the group that claims are made for.
            max_requests: keys that are asked for at the same time.
        """
        self._store, self._shelf, self._block_bytes = Asked(store), shelf, block_bytes
        self._locks = KeyLocks(self._store, shelf, instance_id)
        self._max_requests = max_requests
        self._threads = ThreadPoolExecutor(max_requests, thread_name_prefix="objects")
        self._look_ups = ThreadPoolExecutor(max_requests, thread_name_prefix="object look-ups")
        """Of their own: a look-up does not wait for a long put."""
        self._own = threading.local()
        self._flaws: dict[str, Flaw] = {}
        """Of objects of the right size that can't be loaded: they count as absent, and a put looks at them again."""

    def has(self, keys: Sequence[bytes], deadline: float) -> Batch[Presence]:
        """Says for each key whether an object of the right size is there.

        Args:
            keys: in their wire form; may come twice.
            deadline: moment on the event loop's clock.
        """
        batch = Batch("look-up", len(keys), _unknown, deadline)
        return batch.begin(lambda place: self._look_up(keys[place]), self._look_ups, self._max_requests)

    def put(
        self, memory: Memory, blocks: Ids, keys: Sequence[bytes], lock_validity_s: float | None, deadline: float
    ) -> Batch[KeyOutcome]:
        """Stores blocks; nobody writes to them before the batch is quiesced.

        Args:
            memory: where the blocks are.
            blocks: shape [N].
            keys: of each block.
            lock_validity_s: how long another group's claim to a key is respected; None: no claims are made.
            deadline: moment on the event loop's clock.

        Raises:
            BadRequest: the lengths differ, or the validity is none.
            IncompatibleLayout: the blocks have another size than this tier's objects.
        """
        self._check(memory, blocks, keys)
        _check_validity(lock_validity_s)
        batch = Batch("put", len(keys), _failed, deadline)
        store = partial(self._put, batch, memory, lock_validity_s)
        return batch.begin(lambda place: store(blocks[place], keys[place]), self._threads, self._max_requests)

    def get(self, keys: Sequence[bytes], memory: Memory, blocks: Ids, deadline: float) -> Batch[KeyOutcome]:
        """Loads objects into blocks, which are its own until the batch is quiesced; otherwise as `put`.

        A block is written only once its object was found whole.
        """
        self._check(memory, blocks, keys)
        batch = Batch("get", len(keys), _failed, deadline)
        load = partial(self._get, batch, memory)
        return batch.begin(lambda place: load(blocks[place], keys[place]), self._threads, self._max_requests)

    def remove(self, keys: Sequence[bytes], deadline: float) -> Batch[KeyOutcome]:
        """Removes the objects of keys, whole or not; a key without one is done.

        Args:
            keys: in their wire form; may come twice.
            deadline: moment on the event loop's clock.
        """
        batch = Batch("removal", len(keys), _failed, deadline)
        return batch.begin(lambda place: self._remove(keys[place]), self._threads, self._max_requests)

    def close(self) -> None:
        """Starts no further request. Those that are out end by the store's own timeout."""
        for threads in (self._threads, self._look_ups):
            threads.shutdown(wait=False, cancel_futures=True)

    def _look_up(self, key: bytes) -> Presence:
        identity = self._identity(key)
        name = self._shelf.object_name(identity.key)
        size = self._store.has(name)
        if size is None:
            return Presence(state=PresenceState.ABSENT)
        if flaw := flaw_of_size(size, identity) or self._flaws.get(name):
            return Presence(state=PresenceState.ABSENT, failure=failure_of(flaw, name, identity))
        return Presence(state=PresenceState.PRESENT, size_bytes=identity.payload_bytes)

    def _get(self, batch: Batch[KeyOutcome], memory: Memory, block: int, key: bytes) -> KeyOutcome:
        identity = self._identity(key)
        name = self._shelf.object_name(identity.key)
        stored, flaw = self._read(name, identity, self._buffer(identity))
        if flaw:
            return KeyOutcome(state=OutcomeState.ABSENT, failure=failure_of(flaw, name, identity))
        if stored is None:
            return KeyOutcome(state=OutcomeState.ABSENT)
        with batch.touching():
            memory.write(np.array([block]), WHOLE, _payload(np.frombuffer(stored.data, np.uint8)))
        return KeyOutcome(state=OutcomeState.DONE, size_bytes=identity.payload_bytes)

    def _remove(self, key: bytes) -> KeyOutcome:
        identity = self._identity(key)
        name = self._shelf.object_name(identity.key)
        # The mark first: an object without one is looked at, a mark without an object would be believed.
        self._locks.unmark(identity.key)
        self._store.delete(name)
        self._flaws.pop(name, None)
        return KeyOutcome(state=OutcomeState.DONE)

    def _put(
        self, batch: Batch[KeyOutcome], memory: Memory, lock_validity_s: float | None, block: int, key: bytes
    ) -> KeyOutcome:
        identity = self._identity(key)
        pack = partial(self._pack, batch, memory, block, identity)
        if lock_validity_s is None:
            return self._store_object(identity, pack())
        if self._locks.is_marked(identity.key) and self._is_there(identity):
            return KeyOutcome(state=OutcomeState.ALREADY_PRESENT, size_bytes=identity.payload_bytes)
        with self._locks.held(identity.key, lock_validity_s):
            outcome = self._store_object(identity, pack())
            if outcome.is_success:
                self._mark(identity.key)
            return outcome

    def _pack(self, batch: Batch[KeyOutcome], memory: Memory, block: int, identity: Identity) -> memoryview:
        buffer = self._buffer(identity)
        with batch.touching():
            memory.read(np.array([block]), WHOLE, _payload(buffer))
        write_header(buffer.data, identity)
        return buffer.data

    def _store_object(self, identity: Identity, data: memoryview) -> KeyOutcome:
        name = self._shelf.object_name(identity.key)
        for _ in range(2):
            if self._store.put_if_absent(name, data):
                self._flaws.pop(name, None)
                return KeyOutcome(state=OutcomeState.DONE, size_bytes=identity.payload_bytes)
            if self._is_there(identity):
                return KeyOutcome(state=OutcomeState.ALREADY_PRESENT, size_bytes=identity.payload_bytes)
            if outcome := self._replace(name, identity, data):
                return outcome
        raise StorageFailed(f"{name} is made and cut short again and again by others", place=name, detail="contended")

    def _is_there(self, identity: Identity) -> bool:
        name = self._shelf.object_name(identity.key)
        return name not in self._flaws and self._store.has(name) == identity.object_bytes

    def _replace(self, name: str, identity: Identity, data: memoryview) -> KeyOutcome | None:
        """Puts an object in place of a spoiled one; None when that became another one meanwhile, or none."""
        # Memory of its own: the thread's room holds what is to be stored.
        stored, flaw = self._read(name, identity, np.empty(identity.object_bytes, np.uint8))
        if flaw and not flaw.is_ours:
            return KeyOutcome(state=OutcomeState.FAILED, failure=refusal_of(flaw, name, identity))
        if stored is None:
            return None
        if not flaw:
            return KeyOutcome(state=OutcomeState.ALREADY_PRESENT, size_bytes=identity.payload_bytes)
        # Only the version that was found spoiled, never a whole one that another process stored meanwhile.
        if not self._store.put_if_match(name, data, stored.version):
            return None
        self._flaws.pop(name, None)
        return KeyOutcome(state=OutcomeState.DONE, size_bytes=identity.payload_bytes)

    def _read(self, name: str, identity: Identity, buffer: Bytes) -> tuple[Stored | None, Flaw | None]:
        """Reads an object, if there is one, and notes whether it is what it should be."""
        try:
            stored = self._store.get(name, buffer.data)
            flaw = flaw_of(stored.data, identity) if stored else None
        except TooLarge:
            stored, flaw = None, Flaw.LONG
        # A wrong size needs no note: whoever looks sees it, and sees when it is right again.
        if flaw and stored and len(stored.data) == identity.object_bytes:
            self._flaws[name] = flaw
        else:
            self._flaws.pop(name, None)
        return stored, flaw

    def _mark(self, key: SequenceHash) -> None:
        try:
            self._locks.mark(key)
        except StorageFailed as error:
            # The object is whole without it; the next one to store the key looks at the object itself.
            _log.warning("%s is stored, but could not be marked: %s", key, error)

    def _identity(self, key: bytes) -> Identity:
        return Identity(
            fingerprint=self._shelf.fingerprint,
            rank=self._shelf.rank,
            key=SequenceHash.from_bytes(key),
            payload_bytes=self._block_bytes,
        )

    def _buffer(self, identity: Identity) -> Bytes:
        """Returns this thread's room for one object; its bytes hold until the thread's next key."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = np.empty(identity.object_bytes, np.uint8)
        buffer: Bytes = self._own.buffer
        return buffer

    def _check(self, memory: Memory, blocks: Ids, keys: Sequence[bytes]) -> None:
        if len(blocks) != len(keys):
            raise BadRequest(f"{len(keys)} keys and {len(blocks)} blocks; there must be as many", field="keys")
        block_bytes = memory.geometry.config.block_bytes
        if block_bytes != self._block_bytes:
            raise IncompatibleLayout(
                f"the blocks have {block_bytes} bytes and the objects {self._block_bytes}; use the layout's own tier",
                field="block_bytes",
                source=block_bytes,
                destination=self._block_bytes,
            )


def _payload(data: Bytes) -> Bytes:
    """Returns a view of an object's payload, shape [1, n]."""
    return data[HEADER_BYTES:].reshape(1, -1)


def _check_validity(lock_validity_s: float | None) -> None:
    if lock_validity_s is not None and not 0 < lock_validity_s < _LONGEST_VALIDITY_S:
        raise BadRequest(
            f"a claim can't hold for {lock_validity_s:g} s; give a finite time above 0, or none to make no claims",
            field="lock_validity",
        )


def _failed(error: AyniError) -> KeyOutcome:
    return KeyOutcome(state=OutcomeState.FAILED, failure=Failure.of(error))


def _unknown(error: AyniError) -> Presence:
    return Presence(state=PresenceState.UNKNOWN, failure=Failure.of(error))
