"""Which layouts a worker has, under which handles.  [core]

Handles are numbered upwards from 0 and no number is used twice, so that a handle of a layout that is gone can't mean
another one. The owner id follows from the worker's group and its place in it.
"""

from dataclasses import dataclass, replace

import xxhash

from ayni.blocks.layouts import (
    MAX_LAYOUTS,
    LayoutDescriptor,
    LayoutHandle,
    LocalLayout,
    Tier,
    fingerprint,
)
from ayni.errors import BadRequest, TooLarge, UnknownLayout
from worker_agent.blocks.memory import Memory

_TIERS = list(Tier)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One layout."""

    descriptor: LayoutDescriptor
    memory: Memory

    @property
    def handle(self) -> LayoutHandle:
        """Its name."""
        return self.descriptor.handle

    @property
    def place(self) -> LocalLayout:
        """What its owner calls it."""
        return self.descriptor.place


def owner_id_of(instance_id: str, rank: int) -> int:
    """Returns the owner id of a group's worker: 64 bits of XXH3 over the group's UUID and the rank."""
    return xxhash.xxh3_64_intdigest(f"{instance_id}/{rank}".encode())


class Registry:
    """A worker's own layouts."""

    def __init__(self, owner_id: int, model: str) -> None:
        """Starts empty; `model` names the model whose blocks these are and is part of every fingerprint."""
        self._owner_id = owner_id
        self._model = model
        self._next = 0
        self._entries: dict[LocalLayout, Entry] = {}

    def add(self, place: LocalLayout, memory: Memory, device_ordinal: int = 0) -> Entry:
        """Registers a layout and names it.

        Raises:
            BadRequest: the place is taken, or is in the object tier.
            TooLarge: the worker has named 65535 layouts already.
        """
        if place.tier is Tier.OBJECT:
            raise _no_layouts_in_object_tier()
        if place in self._entries:
            raise BadRequest(f"there is a {place} already; give the second one another resource_id", field="layout")
        geometry = memory.geometry
        descriptor = LayoutDescriptor(
            handle=self._take_handle(),
            tier=place.tier,
            resource_id=place.resource_id,
            config=geometry.config,
            kind=geometry.kind,
            axis_order=geometry.axis_order,
            storage=memory.storage,
            device_ordinal=device_ordinal,
            fingerprint=fingerprint(geometry.config, geometry.axis_order, self._model),
        )
        entry = Entry(descriptor=descriptor, memory=memory)
        self._entries[place] = entry
        return entry

    def remove(self, place: LocalLayout) -> Entry | None:
        """Forgets a layout; its number is not used again."""
        return self._entries.pop(place, None)

    def rename(self, owner_id: int) -> None:
        """Gives all layouts new handles of another owner."""
        if owner_id == self._owner_id:
            return
        self._owner_id = owner_id
        for place, entry in self._entries.items():
            descriptor = replace(entry.descriptor, handle=self._take_handle())
            self._entries[place] = replace(entry, descriptor=descriptor)

    def at(self, place: LocalLayout) -> Entry:
        """Returns a layout by what its owner calls it.

        Raises:
            BadRequest: the place is in the object tier.
            UnknownLayout: there is none.
        """
        if place.tier is Tier.OBJECT:
            raise _no_layouts_in_object_tier()
        if place not in self._entries:
            there = ", ".join(str(entry.place) for entry in self.entries()) or "none"
            raise UnknownLayout(f"this worker has no {place}; it has: {there}", layout=place)
        return self._entries[place]

    def named(self, handle: LayoutHandle) -> Entry:
        """Returns a layout by its handle.

        Raises:
            UnknownLayout: no layout of this worker has it.
        """
        for entry in self._entries.values():
            if entry.handle == handle:
                return entry
        raise UnknownLayout(
            f"this worker ({self._owner_id:016x}) has no layout {handle}; ask it for its metadata again", layout=handle
        )

    def entries(self) -> list[Entry]:
        """Returns all layouts in order of resource and then of tier."""
        return sorted(self._entries.values(), key=lambda e: (e.place.resource_id, _TIERS.index(e.place.tier)))

    @property
    def owner_id(self) -> int:
        """Owner id of all handles."""
        return self._owner_id

    def _take_handle(self) -> LayoutHandle:
        if self._next >= MAX_LAYOUTS:
            raise TooLarge(
                f"this worker has named {MAX_LAYOUTS} layouts already; start it again",
                field="layouts",
                limit=MAX_LAYOUTS,
                received=self._next + 1,
            )
        self._next += 1
        return LayoutHandle(owner_id=self._owner_id, number=self._next - 1)


def _no_layouts_in_object_tier() -> BadRequest:
    return BadRequest("the object tier has keys and no layouts: name objects by their keys", field="tier")
