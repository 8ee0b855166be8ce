"""GrpcBlockWorker: a worker that is reached over gRPC, as a BlockWorker.  [shell]

Whoever calls can't tell it from a worker in the same process, except by what the network adds; see `worker_calls`.
Ranks in answers are those that the caller knows the worker by.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Self

from google.protobuf.message import Message
from grpc import aio

from ayni.blocks import group_messages, metadata_messages, outcome_messages, transfer_messages
from ayni.blocks.calls import Connect, Get, Has, LocalTransfer, Offload, Onboard, Pull, Put, Remove
from ayni.blocks.ids import Ids, as_ids
from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.messages import field
from ayni.blocks.metadata import Configured, GroupConfig, Imported, RemoteLayout, RemoteState, WorkerMetadata
from ayni.blocks.objects import KeyOutcome, KeyReport, OutcomeState, Presence, PresenceReport, PresenceState
from ayni.blocks.transfers import DEFAULT_OPTIONS, Failure, ObjectKeys, PullPlan, RemoteDescriptor, TransferOptions
from ayni.blocks.worker import Notification
from ayni.channels import open_channel
from ayni.endpoints import ClientTls
from ayni.errors import BadRequest
from ayni.v1 import worker_pb2 as pb
from coordinator_service.worker_calls import Request, WorkerCalls

CALL_TIMEOUT_S = 60.0
"""Longest time for a call that names none."""


class GrpcBlockWorker:
    """One worker behind an address. Call from one event loop."""

    worker_count = 1

    def __init__(
        self, channel: aio.Channel, rank: int = 0, name: str = "", *, epoch: int = 0, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        """Takes a channel that carries the join token.

        Args:
            channel: to the worker; `close` closes it.
            rank: what answers say; a configuration sets it too.
            name: what errors and logs call the worker; empty: its rank.
            epoch: what calls say until a configuration sets it; 0: nothing is said.
            timeout_s: longest time for a call that names none.
        """
        self._calls = WorkerCalls(channel, name or f"worker {rank}")
        self._rank = rank
        self._epoch = epoch
        self._timeout_s = timeout_s

    @classmethod
    def dial(
        cls, address: str, token: str, rank: int = 0, *, tls: ClientTls | None = None, insecure: bool = False
    ) -> Self:
        """Returns the worker at an address; see `ayni.channels.open_channel`."""
        return cls(open_channel(address, token, tls, insecure), rank, f"worker {rank} at {address}")

    async def close(self) -> None:
        """Gives up the transfers that are under way and ends the connection."""
        await self._calls.close()

    async def configure_layouts(self, config: GroupConfig) -> Configured:
        """See BlockWorker. Calls are made in the configuration's epoch from now on."""
        configured = await self._calls.ask(
            "ConfigureLayouts",
            lambda: group_messages.config_message(config),
            group_messages.configured_of,
            self._timeout_s,
        )
        self._epoch, self._rank = config.epoch, config.rank
        return configured

    async def export_metadata(self) -> tuple[WorkerMetadata, ...]:
        """See BlockWorker."""

        def read(response: pb.ExportMetadataResponse) -> tuple[WorkerMetadata, ...]:
            return (field(response, "metadata", metadata_messages.metadata_of),)

        return await self._calls.ask(
            "ExportMetadata", lambda: pb.ExportMetadataRequest(epoch=self._epoch), read, self._timeout_s
        )

    async def import_metadata(self, metadata: Sequence[WorkerMetadata]) -> tuple[Imported, ...]:
        """See BlockWorker."""
        if len(metadata) != 1:
            raise BadRequest(f"rank {self._rank} imports one worker at a time, not {len(metadata)}", field="metadata")

        def request() -> Message:
            return pb.ImportMetadataRequest(epoch=self._epoch, metadata=metadata_messages.metadata_message(metadata[0]))

        return (await self._calls.ask("ImportMetadata", request, group_messages.imported_of, self._timeout_s),)

    async def connect_remote(
        self, instance_id: str, metadata: Sequence[WorkerMetadata], engines: Sequence[str] = ()
    ) -> tuple[RemoteLayout, ...]:
        """See BlockWorker."""
        asked = Connect(instance_id=instance_id, metadata=tuple(metadata), engines=tuple(engines))

        def request() -> Message:
            return group_messages.connect_message(asked, self._epoch)

        return await self._calls.ask("ConnectRemote", request, group_messages.connected_of, self._timeout_s)

    async def disconnect_remote(self, instance_id: str) -> bool:
        """See BlockWorker."""

        def request() -> Message:
            return pb.DisconnectRemoteRequest(epoch=self._epoch, instance_id=instance_id)

        def read(response: pb.DisconnectRemoteResponse) -> bool:
            return response.was_connected

        return await self._calls.ask("DisconnectRemote", request, read, self._timeout_s)

    async def has_remote_metadata(self, instance_id: str) -> RemoteState:
        """See BlockWorker."""

        def request() -> Message:
            return pb.HasRemoteMetadataRequest(instance_id=instance_id)

        return await self._calls.ask("HasRemoteMetadata", request, metadata_messages.remote_state_of, self._timeout_s)

    def execute_local_transfer(
        self,
        source: LocalLayout,
        destination: LocalLayout,
        source_blocks: Iterable[int],
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """See BlockWorker."""

        def request(ids: Ids) -> Message:
            asked = LocalTransfer(
                source=source,
                destination=destination,
                source_blocks=as_ids(source_blocks),
                destination_blocks=ids,
                options=options,
            )
            return transfer_messages.local_transfer_message(asked, self._epoch)

        return self._calls.transfer("ExecuteLocalTransfer", destination_blocks, request, options, self._rank)

    def execute_remote_onboard(
        self,
        source: RemoteDescriptor,
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """See BlockWorker."""

        def request(ids: Ids) -> Message:
            asked = Onboard(source=source, destination=destination, destination_blocks=ids, options=options)
            return transfer_messages.onboard_message(asked, self._epoch)

        return self._calls.transfer("ExecuteRemoteOnboard", destination_blocks, request, options, self._rank)

    def execute_remote_offload(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        destination: RemoteDescriptor,
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """See BlockWorker."""

        def request(_ids: Ids) -> Message:
            asked = Offload(
                source=source, source_blocks=as_ids(source_blocks), destination=destination, options=options
            )
            return transfer_messages.offload_message(asked, self._epoch)

        blocks = [0] * len(destination.keys) if isinstance(destination, ObjectKeys) else destination.blocks
        return self._calls.transfer("ExecuteRemoteOffload", blocks, request, options, self._rank)

    def execute_remote_onboard_for_instance(
        self,
        instance_id: str,
        remote_tier: Tier,
        source_blocks: Iterable[int],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> Notification:
        """See BlockWorker."""

        def request(ids: Ids) -> Message:
            plan = PullPlan(
                instance_id=instance_id,
                remote_tier=remote_tier,
                source_blocks=as_ids(source_blocks),
                destination=destination,
                destination_blocks=ids,
                shards=(),
            )
            return transfer_messages.pull_message(Pull(plan=plan, options=options), self._epoch)

        return self._calls.transfer("ExecuteRemoteOnboardForInstance", destination_blocks, request, options, self._rank)

    def execute_remote_pull(self, plan: PullPlan, options: TransferOptions = DEFAULT_OPTIONS) -> Notification:
        """See RankWorker."""

        def request(_ids: Ids) -> Message:
            return transfer_messages.pull_message(Pull(plan=plan, options=options), self._epoch)

        return self._calls.transfer(
            "ExecuteRemoteOnboardForInstance", plan.destination_blocks, request, options, self._rank
        )

    async def has_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> PresenceReport:
        """See BlockWorker. Where the worker can't be asked, every key is UNKNOWN."""

        def request() -> Message:
            return outcome_messages.has_message(Has(layout=layout, keys=tuple(keys)), self._epoch)

        read = partial(outcome_messages.presences_of, num_keys=len(keys))
        return await self._calls.ask_about_keys("HasBlocks", request, read, timeout_s, partial(_unknown, len(keys)))

    async def put_blocks(
        self,
        source: LocalLayout,
        source_blocks: Iterable[int],
        keys: Sequence[bytes],
        lock_validity_s: float | None = None,
        timeout_s: float = 60.0,
    ) -> KeyReport:
        """See BlockWorker. Where the worker can't be asked, every key has failed."""

        def request() -> Message:
            asked = Put(
                source=source,
                source_blocks=as_ids(source_blocks),
                keys=tuple(keys),
                lock_validity_s=lock_validity_s,
            )
            return outcome_messages.put_message(asked, self._epoch)

        return await self._ask_keys("PutBlocks", request, len(keys), timeout_s)

    async def get_blocks(
        self,
        keys: Sequence[bytes],
        destination: LocalLayout,
        destination_blocks: Iterable[int],
        timeout_s: float = 60.0,
    ) -> KeyReport:
        """See BlockWorker. Where the worker can't be asked, every key has failed."""

        def request() -> Message:
            asked = Get(keys=tuple(keys), destination=destination, destination_blocks=as_ids(destination_blocks))
            return outcome_messages.get_message(asked, self._epoch)

        return await self._ask_keys("GetBlocks", request, len(keys), timeout_s)

    async def remove_blocks(self, layout: LocalLayout, keys: Sequence[bytes], timeout_s: float = 60.0) -> KeyReport:
        """See BlockWorker. Where the worker can't be asked, every key has failed."""

        def request() -> Message:
            return outcome_messages.remove_message(Remove(layout=layout, keys=tuple(keys)), self._epoch)

        return await self._ask_keys("RemoveBlocks", request, len(keys), timeout_s)

    async def _ask_keys(self, call: str, request: Request, num_keys: int, timeout_s: float) -> KeyReport:
        read = partial(outcome_messages.outcomes_of, num_keys=num_keys)
        return await self._calls.ask_about_keys(call, request, read, timeout_s, partial(_failed, num_keys))


def _unknown(num_keys: int, failure: Failure) -> PresenceReport:
    unknown = (Presence(state=PresenceState.UNKNOWN, failure=failure),) * num_keys
    return PresenceReport(presences=unknown, by_rank=(unknown,))


def _failed(num_keys: int, failure: Failure) -> KeyReport:
    failed = (KeyOutcome(state=OutcomeState.FAILED, failure=failure),) * num_keys
    return KeyReport(outcomes=failed, by_rank=(failed,))
