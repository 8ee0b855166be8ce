"""An agent that serves blocks, to be fuzzed, and a peer that it can reach."""

import os
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from ayni.channels import open_sync_channel
from ayni.v1 import worker_pb2 as pb
from tests.support.coordinator import TOKEN
from tests.support.fuzz_calls import Base, Ended, Waiting, path_of
from tests.support.fuzz_servers import tree_listing
from tests.support.serve_agents import ServeAgent
from worker_agent.layouts_file import LayoutEntry

SERVICE = pb.DESCRIPTOR.services_by_name["WorkerService"]
NUM_BLOCKS = 16

_PATH = f"/{SERVICE.full_name}"
_ENTRY = LayoutEntry(num_blocks=NUM_BLOCKS, num_layers=2, page_size=4, inner_dim=16, num_heads=4)
_BLOCK_BYTES = 2 * 2 * 4 * 16 * 2
_INSTANCE = str(uuid.UUID(int=1))
_HIGHEST_EPOCH = 1 << 62
_WAITING = Waiting(
    methods=frozenset(name for name in SERVICE.methods_by_name if name.startswith(("Execute", "ReadB", "WriteB"))),
    timeout=1.0,
)
_HOSTILE = [
    pb.EngineExport(name=name, version=1, data=data, crc32=zlib.crc32(data))
    for name in ("shm", "grpc")
    for data in (
        b"",
        b"null",
        b"[" * 60_000,
        b'{"host":' * 5_000,
        b'{"incarnation": 1' + b"0" * 5_000 + b"}",
        b'{"address": "127.0.0.1:1", "tls": true}',
        b'{"address": "127.0.0.1:1", "tls": false}',
        b'{"address": ["127.0.0.1:1"], "tls": "no"}',
        b"\xff\xfe\x00",
        bytes(100_000),
    )
]
_REPLACING = {"TOO_LARGE", "STORAGE_FAILED", "UNSUPPORTED", "BAD_REQUEST", "UNKNOWN_LAYOUT"}
"""Refusals of ConfigureLayouts after which the layouts that a leader had asked for are gone, as documented."""


class FuzzedAgent:
    """An agent with layouts in three tiers, an object store in a folder, and a connected peer."""

    methods: ClassVar = {path_of(method): method for method in SERVICE.methods}
    name = "agent that serves blocks"

    def __init__(self, folder: Path) -> None:
        self.hints: dict[str, list[Any]] = {}
        runtime = folder / "run"
        runtime.mkdir(parents=True, mode=0o700)
        variables = {"XDG_RUNTIME_DIR": str(runtime), "HTTPS_PROXY": "http://127.0.0.1:9"}
        self._agent = ServeAgent("fuzzed", folder / "fuzzed", _ENTRY, **variables)
        self._peer = ServeAgent("peer", folder / "peer", _ENTRY, **variables)
        for agent in (self._agent, self._peer):
            agent.launch()
        for agent in (self._agent, self._peer):
            agent.wait_until_ready()
        with open_sync_channel(self._peer.address, TOKEN) as channel:
            self._remote = _export(channel)
        self._open()

    @property
    def pid(self) -> int:
        return self._agent.pid

    @property
    def address(self) -> str:
        return self._agent.address

    @property
    def log(self) -> str:
        return self._agent.log()

    def close(self) -> None:
        self.channel.close()
        self._agent.close()
        self._peer.close()

    def bases(self, method: MethodDescriptor) -> list[Base]:
        return [Base(frames=frames) for frames in _bases(method.name, self._own, self._remote)]

    def snapshot(self) -> dict[str, object]:
        asked = pb.HasRemoteMetadataRequest(instance_id=self._remote.instance_id)
        return {
            "metadata": str(_export(self.channel)),
            "connected": str(pb.HasRemoteMetadataResponse.FromString(self._call("HasRemoteMetadata", asked))),
            "memory": self._memory(),
            "files": tree_listing(self._agent.folder / "root"),
        }

    @property
    def folder(self) -> Path:
        """Where the agent runs; its root is the folder "root" there."""
        return self._agent.folder

    def configuration(self) -> pb.ConfigureLayoutsRequest:
        """Returns the configuration that the agent would take as it is."""
        request = next(_bases("ConfigureLayouts", self._own, self._remote))[0]
        assert isinstance(request, pb.ConfigureLayoutsRequest)
        return request

    def may_change(self, ended: Ended) -> bool:
        if ended.call.name == "WriteBlocks":
            return True  # Refused or not, bytes that came before hold until they are written again.
        return ended.call.name == "ConfigureLayouts" and ended.reason in _REPLACING

    def good_call(self) -> None:
        assert _export(self.channel).layouts

    def renew(self) -> bool:
        assert self._agent.is_running, f"the agent died:\n{self.log[-3000:]}"
        self._own = _export(self.channel)
        if self._own.epoch >= _HIGHEST_EPOCH:
            self.channel.close()
            self._agent.end()
            self._agent.restart()
            self._open()
            return True
        is_changed = (self._own.instance_id, len(self._own.layouts)) != (_INSTANCE, 3)
        if is_changed:
            self._configure(self._own.epoch + 1)
        self._tell()
        return is_changed

    def _open(self) -> None:
        self.channel = open_sync_channel(self.address, TOKEN)
        self._configure(1)
        self._tell()

    def _configure(self, epoch: int) -> None:
        self._own = pb.WorkerMetadata(epoch=epoch)
        self._call("ConfigureLayouts", self.configuration())
        connect = next(_bases("ConnectRemote", pb.WorkerMetadata(epoch=epoch), self._remote))[0]
        self._call("ConnectRemote", connect)
        self._own = _export(self.channel)

    def _call(self, name: str, request: Message) -> bytes:
        call: Any = self.channel.unary_unary(f"{_PATH}/{name}")
        return call(request.SerializeToString(), timeout=30)

    def _memory(self) -> tuple[int, ...]:
        """Checksums of the pools of blocks."""
        found = []
        for path in sorted(Path(f"/proc/{self.pid}/fd").iterdir(), key=lambda one: int(one.name)):
            try:
                if os.readlink(path).startswith("/memfd:ayni-blocks "):
                    found.append(zlib.crc32(path.read_bytes()))
            except FileNotFoundError:
                continue
        return tuple(found)

    def _tell(self) -> None:
        own, remote = self._own, self._remote
        self.hints |= {
            "waiting": [_WAITING],
            "metadata": [(), (("ayni-call", "c1"),), (("ayni-call", "x" * 2_000),), (("ayni-call-bin", b"\0\xff"),)],
            "epoch": [own.epoch, 0, own.epoch + 1],
            "remote_epoch": [remote.epoch],
            "instance_id": [_INSTANCE, own.instance_id, remote.instance_id, remote.instance_id],
            "incarnation": [own.incarnation, remote.incarnation],
            "owner_id": [own.owner_id, remote.owner_id],
            "low": [own.owner_id, remote.owner_id],
            "high": [layout.handle.high for layout in (*own.layouts, *remote.layouts)],
            "address": [remote.address, "127.0.0.1:1", ""],
            "WorkerMetadata.layouts": [*own.layouts, *remote.layouts],
            "WorkerMetadata.engines": [*own.engines, *remote.engines, *_HOSTILE],
            "ranks": [remote, own],
            "ExportMetadataRequest.epoch": [own.epoch, 0],
            "ImportMetadataRequest.metadata": [remote, own],
            "engine": ["", "grpc", "shm"],
            "ObjectStore.kind": ["file"],
            "endpoint": ["", "", "http://127.0.0.1:9"],
            "bucket": ["bucket", "other", "../out", "/tmp"],
            "prefix": ["", "p/", "../"],
            "disk_folder": ["", "folder", "a/../../b"],
            "num_blocks": [NUM_BLOCKS, 8, 1],
            "world_size": [1, 2],
            "rank": [0],
            "starts": [0, 1, 5, NUM_BLOCKS - 1, NUM_BLOCKS],
            "counts": [1, 2, 3],
            "block_bytes": [_BLOCK_BYTES, _BLOCK_BYTES // 2],
            "sequence_hashes": [_keys(1), _keys(3)],
            "version": [1],
            "fingerprint": [layout.fingerprint for layout in own.layouts],
        }


def _export(channel: grpc.Channel) -> pb.WorkerMetadata:
    call: Any = channel.unary_unary(f"{_PATH}/ExportMetadata")
    return pb.ExportMetadataResponse.FromString(call(b"", timeout=30)).metadata


def _keys(count: int) -> bytes:
    return b"".join(bytes([7 + place]) * 16 + place.to_bytes(4, "little") + b"\x14\0\0\0" for place in range(count))


def _bases(method: str, own: pb.WorkerMetadata, remote: pb.WorkerMetadata) -> Iterator[list[Message]]:
    device, host = pb.LocalLayout(tier=pb.TIER_DEVICE), pb.LocalLayout(tier=pb.TIER_HOST)
    disk = pb.LocalLayout(tier=pb.TIER_DISK)
    three, others = pb.BlockIds(starts=[1], counts=[3]), pb.BlockIds(starts=[7, 5, 9])
    keys = pb.ObjectKeys(sequence_hashes=_keys(3))
    epoch = own.epoch
    if method == "ConfigureLayouts":
        layouts = [pb.LayoutRequest(tier=tier, num_blocks=NUM_BLOCKS) for tier in (pb.TIER_HOST, pb.TIER_DISK)]
        yield [
            pb.ConfigureLayoutsRequest(
                epoch=epoch,
                instance_id=_INSTANCE,
                world_size=1,
                mode=pb.PARALLELISM_MODE_TENSOR_PARALLEL,
                layouts=layouts,
                object_store=pb.ObjectStore(kind="file", bucket="bucket"),
            )
        ]
    elif method == "ConnectRemote":
        yield [pb.ConnectRemoteRequest(epoch=epoch, instance_id=remote.instance_id, ranks=[remote])]
    elif method == "ImportMetadata":
        yield [pb.ImportMetadataRequest(epoch=epoch, metadata=remote)]
    elif method in ("DisconnectRemote", "HasRemoteMetadata"):
        yield [getattr(pb, f"{method}Request")(instance_id=remote.instance_id)]
    elif method == "ExecuteLocalTransfer":
        for source, destination in ((device, host), (host, disk), (disk, device), (device, device)):
            yield [
                pb.ExecuteLocalTransferRequest(
                    epoch=epoch,
                    source=source,
                    destination=destination,
                    source_blocks=three,
                    destination_blocks=others,
                    options=pb.TransferOptions(layers=pb.LayerRange(start=0, stop=1)),
                )
            ]
    elif method in ("ExecuteRemoteOnboard", "ExecuteRemoteOffload"):
        blocks = pb.RemoteBlocks(layout=remote.layouts[0].handle, blocks=three)
        for place in (pb.RemoteDescriptor(blocks=blocks), pb.RemoteDescriptor(objects=keys)):
            if method == "ExecuteRemoteOnboard":
                yield [pb.ExecuteRemoteOnboardRequest(source=place, destination=host, destination_blocks=others)]
            else:
                yield [pb.ExecuteRemoteOffloadRequest(source=host, destination=place, source_blocks=others)]
    elif method == "ExecuteRemoteOnboardForInstance":
        yield [
            pb.ExecuteRemoteOnboardForInstanceRequest(
                instance_id=remote.instance_id,
                remote_tier=pb.TIER_DEVICE,
                source_blocks=three,
                destination=host,
                destination_blocks=others,
            )
        ]
    elif method == "HasBlocks":
        yield [pb.HasBlocksRequest(layout=host, keys=keys)]
    elif method == "PutBlocks":
        yield [pb.PutBlocksRequest(source=host, source_blocks=three, keys=keys)]
    elif method == "GetBlocks":
        yield [pb.GetBlocksRequest(keys=keys, destination=host, destination_blocks=others)]
    elif method == "ReadBlocks":
        for layout in own.layouts:
            yield [pb.ReadBlocksRequest(layout=layout.handle, incarnation=own.incarnation, blocks=three)]
    elif method == "WriteBlocks":
        for layout in own.layouts:
            begin = pb.WriteBegin(
                layout=layout.handle, incarnation=own.incarnation, blocks=three, block_bytes=_BLOCK_BYTES
            )
            chunk = pb.BlockChunk(blocks=[1, 2, 3], layer_stop=2, data=bytes(3 * _BLOCK_BYTES))
            yield [pb.WriteBlocksRequest(begin=begin), pb.WriteBlocksRequest(chunk=chunk)]
