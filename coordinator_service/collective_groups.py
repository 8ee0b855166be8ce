"""Which processes a group of CollectiveService has, and when it is whole.  [core]"""

from dataclasses import dataclass, field

from ayni.errors import Deadline, IdentityTaken, Incompatible, TooLarge, WorldFull

MOST_GROUPS = 64
"""Groups at a time."""
_MOST_NAMED = 8
"""Ranks that a sentence names."""


@dataclass(slots=True, eq=False)
class Group:
    """One group: from its first process until its last one is gone."""

    name: str
    world_size: int
    processes: dict[int, str] = field(default_factory=dict)
    """Name of each process, by rank."""
    was_whole: bool = False
    """Whether all processes were there. Nobody may enter any more."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the processes, by rank."""
        return tuple(self.processes[rank] for rank in sorted(self.processes))

    @property
    def missing(self) -> list[int]:
        """Ranks that nobody has."""
        return [rank for rank in range(self.world_size) if rank not in self.processes]

    @property
    def missing_ranks(self) -> str:
        """The same in words, such as "ranks 1, 3"."""
        named = ", ".join(map(str, self.missing[:_MOST_NAMED]))
        more = len(self.missing) - _MOST_NAMED
        return f"rank{'s' if len(self.missing) > 1 else ''} {named}" + (f" and {more} more" if more > 0 else "")

    def not_whole(self, seconds: float) -> Deadline:
        """Returns what its processes are told when the others did not come in so many seconds."""
        there = ", ".join(f"{self.processes[rank]} (rank {rank})" for rank in sorted(self.processes)[:_MOST_NAMED])
        return Deadline(
            f"group {self.name!r} was not whole within {seconds:g} s (timeouts.group in the coordinator's run file): "
            f"{self.missing_ranks} of {self.world_size} did not come; there are {there}: see how the others ended, and "
            "start all of them anew",
            waiting_for=self.missing_ranks,
            timeout=seconds,
        )


class Groups:
    """All groups of a coordinator."""

    def __init__(self, most_processes: int) -> None:
        """Starts without a group; one may have so many processes."""
        self._most = most_processes
        self._groups: dict[str, Group] = {}

    def enter(self, name: str, world_size: int, rank: int | None, process: str) -> tuple[Group, int]:
        """Gives a process its place; returns the group and the rank.

        Where a group was whole and a process of it has gone, the next one to come opens another group of that name.

        Raises:
            TooLarge: too many processes, or groups.
            Incompatible: the group has another size.
            IdentityTaken: another process has the rank.
            WorldFull: the group is whole already.
        """
        group = self._groups.get(name)
        if group is None or (group.was_whole and group.missing):
            group = self._new(name, world_size)
        if group.world_size != world_size:
            raise Incompatible(
                f"group {name!r} was opened with world_size {group.world_size} and {process} says {world_size}: all of "
                "its processes must say the same",
                field="world_size",
                coordinator=group.world_size,
                worker=world_size,
            )
        if group.was_whole:
            raise WorldFull(
                f"group {name!r} has all of its {world_size} processes ({', '.join(group.names)}): use another name, "
                "or start all of them anew",
                max_workers=world_size,
            )
        place = group.missing[0] if rank is None else rank
        if place >= world_size:
            raise Incompatible(
                f"rank {place} is impossible in group {name!r} of {world_size} processes",
                field="rank",
                coordinator=f"0 to {world_size - 1}",
                worker=place,
            )
        if place in group.processes:
            raise IdentityTaken(
                f"rank {place} of group {name!r} is {group.processes[place]} already",
                worker_name=process,
                worker_id=place,
                peer=group.processes[place],
            )
        self._groups[name] = group
        group.processes[place] = process
        group.was_whole = not group.missing
        return group, place

    def leave(self, group: Group, rank: int) -> None:
        """Takes a process out; the group is forgotten with its last one."""
        group.processes.pop(rank, None)
        if not group.processes:
            self.forget(group)

    def forget(self, group: Group) -> None:
        """Lets nobody else into a group; who comes next opens another one of that name."""
        if self._groups.get(group.name) is group:
            del self._groups[group.name]

    def _new(self, name: str, world_size: int) -> Group:
        if not 1 <= world_size <= self._most:
            raise TooLarge(
                f"group {name!r} would have {world_size} processes; this coordinator takes 1 to {self._most} "
                "(max_workers in its run file)",
                field="world_size",
                limit=self._most,
                received=world_size,
            )
        if len(self._groups) >= MOST_GROUPS:
            raise TooLarge(
                f"there are {MOST_GROUPS} groups already", field="groups", limit=MOST_GROUPS, received=MOST_GROUPS + 1
            )
        return Group(name=name, world_size=world_size)
