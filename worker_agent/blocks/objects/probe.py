"""Whether a store keeps what conditions promise, found out before anything relies on it.  [shell]

Some servers take conditional writes and ignore the condition without a word. Two claims to one key would both be
granted then, and blocks be overwritten while others read them, so such a store is refused when it is opened.
"""

import secrets

from ayni.errors import Unsupported
from worker_agent.blocks.objects.store import ObjectStore


def check_conditions(store: ObjectStore, place: str, prefix: str = "") -> None:
    """Writes one object under a random name in every way that must fail, and removes it.

    Args:
        store: just opened.
        place: what to call it.
        prefix: that of all names, since others may be forbidden.

    Raises:
        Unsupported: the store ignores conditions.
        StorageFailed: the store can't be used at all.
    """
    name = f"{prefix}probe-{secrets.token_hex(8)}"
    first, second, buffer = memoryview(b"first"), memoryview(b"second"), memoryview(bytearray(16))
    # Outside, so that the reason is the first one where nothing can be done in the store at all.
    store.put_if_absent(name, first)
    try:
        if store.put_if_absent(name, second):
            raise _ignores(place, "create an object only where there is none (If-None-Match)")
        found = store.get(name, buffer)
        if found is None or found.data != first:
            raise _ignores(place, "return what was just stored")
        if not store.put_if_match(name, second, found.version):
            raise _ignores(place, "replace an object of a given version (If-Match)")
        if store.put_if_match(name, first, found.version):
            raise _ignores(place, "replace an object only if it has a given version (If-Match)")
    finally:
        store.delete(name)


def _ignores(place: str, what: str) -> Unsupported:
    return Unsupported(
        f"the store {place} does not {what}, so blocks in it could be overwritten by others; use a store that does",
        field="object_store",
        detail=what,
    )
