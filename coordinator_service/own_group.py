"""What a leader knows of its own group, and which of a worker's layouts stands for another's.  [core]

A layout handle names a layout of one worker. Where a caller gives one to a group, each rank needs its own: the layout
of the same tier and resource.
"""

from collections.abc import Sequence
from dataclasses import replace

from ayni.blocks.layouts import LayoutHandle, LocalLayout
from ayni.blocks.metadata import GroupConfig, ParallelismMode, WorkerMetadata
from ayni.blocks.transfers import TransferOptions
from ayni.errors import BadRequest, Fault, StaleEpoch, UnknownLayout, Unsupported
from coordinator_service.parallelism import PRIMARY, ParallelismTemplate, Templates, derive_templates, stamp
from coordinator_service.remote_groups import LocalGroup

Handles = tuple[LayoutHandle, ...]
"""One for each rank."""


class OwnGroup:
    """A group of workers, as far as its leader knows it: nothing before it was configured or exported."""

    def __init__(self, num_ranks: int, template: ParallelismTemplate | None, templates: Templates) -> None:
        """Takes what is known beforehand: how the primary resource is shared, and how others are."""
        self._given = dict(templates) | ({PRIMARY: template} if template else {})
        self._imported: dict[LayoutHandle, tuple[LayoutHandle | None, ...]] = {}
        self._epoch = 0
        mode = template.mode if template else ParallelismMode.TENSOR_PARALLEL
        self.local = LocalGroup(num_ranks=num_ranks, templates=self._given, mode=mode)

    @property
    def num_ranks(self) -> int:
        """Workers of the group."""
        return self.local.num_ranks

    def check_config(self, config: GroupConfig) -> None:
        """Refuses a configuration before any rank is asked.

        Raises:
            StaleEpoch: a newer one was made.
            BadRequest: it says that the model is shared in another way than the template.
        """
        if config.epoch < self._epoch:
            message = f"epoch {config.epoch} is over; this group was configured in epoch {self._epoch}"
            raise StaleEpoch(message, epoch=config.epoch, current_epoch=self._epoch)
        if PRIMARY in self._given and config.mode is not self._given[PRIMARY].mode:
            says = f"{config.mode.value}, but the leader's template says {self._given[PRIMARY].mode.value}"
            raise BadRequest(f"the configuration says {says}; both must be the same", field="mode")

    def configured(self, epoch: int) -> None:
        """Remembers that all ranks were configured."""
        self._epoch = epoch

    def install(
        self, answers: Sequence[Sequence[WorkerMetadata]], mode: ParallelismMode | None = None
    ) -> tuple[WorkerMetadata, ...]:
        """Remembers what the ranks exported; returns it, stamped where it is known how the primary resource is shared.

        Args:
            answers: of each rank, in rank order.
            mode: how the ranks were told to share the model; None: as they say themselves.

        Raises:
            Fault: a rank answered for another number of ranks than one.
            BadRequest: a rank says that the model is shared in another way.
        """
        metadata = tuple(_single(rank, answer) for rank, answer in enumerate(answers))
        mode = _agreed_mode(metadata, self._given[PRIMARY].mode if PRIMARY in self._given else mode)
        templates = derive_templates(metadata, mode) | self._given
        stamped = stamp(templates, metadata) if PRIMARY in templates and metadata else metadata
        self.local = LocalGroup(num_ranks=self.num_ranks, metadata=stamped, templates=templates, mode=mode)
        return stamped

    def remember_imported(self, metadata: Sequence[WorkerMetadata]) -> None:
        """Remembers whose layouts each rank imported: entry i is of the worker that rank i imported."""
        for one in metadata:
            for layout in one.layouts:
                self._imported[layout.handle] = tuple(_at(other, layout.place) for other in metadata)

    def imported(self, handle: LayoutHandle) -> Handles | None:
        """Returns the layout that each rank imported in place of a given one; None when no rank imported it.

        Raises:
            UnknownLayout: another rank imported no such layout.
        """
        if handle not in self._imported:
            return None
        return _complete(handle, self._imported[handle], "imported")

    def options_on(self, rank: int, options: TransferOptions) -> TransferOptions:
        """Returns the options for one rank: blocks to pass through are in its own layout.

        Raises:
            Unsupported: nobody knows which worker of the group has the layout to pass through.
            UnknownLayout: a rank has no such layout.
        """
        if options.bounce is None or self.num_ranks == 1:
            return options
        handle = options.bounce.layout
        for one in self.local.metadata:
            for layout in one.layouts:
                if layout.handle == handle:
                    handles = tuple(_at(other, layout.place) for other in self.local.metadata)
                    mine = _complete(handle, handles, "has")[rank]
                    return replace(options, bounce=replace(options.bounce, layout=mine))
        message = (
            f"no rank of the group is known to have layout {handle} to pass blocks through; name a layout that "
            "export_metadata returned last"
        )
        raise Unsupported(message, field="options.bounce", detail=str(handle))


def _single(rank: int, answer: Sequence[WorkerMetadata]) -> WorkerMetadata:
    if len(answer) != 1:
        message = f"rank {rank} exported metadata of {len(answer)} ranks; a group is made of single workers"
        raise Fault(message, detail="metadata")
    return answer[0]


def _agreed_mode(metadata: Sequence[WorkerMetadata], known: ParallelismMode | None) -> ParallelismMode:
    """Returns how the ranks share the model; what a rank does not say it does not contradict.

    Raises:
        BadRequest: a rank says otherwise than the leader, or than another rank.
    """
    said = [(rank, one.mode) for rank, one in enumerate(metadata) if one.mode]
    mode = known or (said[0][1] if said else ParallelismMode.TENSOR_PARALLEL)
    for rank, its_mode in said:
        if its_mode is not mode:
            message = (
                f"rank {rank} says that its group is {its_mode.value}, but this leader has it as {mode.value}; "
                "configure all ranks as one group"
            )
            raise BadRequest(message, field="mode", rank=rank)
    return mode


def _at(one: WorkerMetadata, place: LocalLayout) -> LayoutHandle | None:
    return next((layout.handle for layout in one.layouts if layout.place == place), None)


def _complete(handle: LayoutHandle, handles: Sequence[LayoutHandle | None], verb: str) -> Handles:
    for rank, mine in enumerate(handles):
        if mine is None:
            message = f"rank {rank} {verb} no counterpart of layout {handle}: none of that tier and resource"
            raise UnknownLayout(message, layout=handle, rank=rank)
    return tuple(mine for mine in handles if mine is not None)
