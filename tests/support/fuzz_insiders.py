"""Members of a fuzzed run: sessions and leases that the fuzzer has, and calls that would be taken of them."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from ayni import PROTOCOL_VERSION
from ayni.v1 import collective_pb2, tensor_pb2, worker_pb2
from ayni.v1 import coordinator_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["CoordinatorService"]
PATH = f"/{SERVICE.full_name}"
SIZE = 1_000
"""Elements of the gradients that the fuzzer's members speak of."""


class Insider:
    """A member that does nothing by itself but hold its stream of assignments."""

    def __init__(self, channel: grpc.Channel, name: str, stays: bool) -> None:
        self.name, self.session, self.worker_id = name, "", -1
        self.assignment = pb.Assignment()
        self._channel, self._stays = channel, stays
        self._stream: Any = None
        self._attached: Any = None
        self._leased = threading.Event()
        self._nonce = 0

    def renew(self) -> bool:
        """Joins again when it is no member any more; says whether it was none."""
        if self._is_member() and not (self._stays and (self._stream is None or self._stream.done())):
            return False
        self.close()
        self._nonce += 1
        request = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            worker_name=self.name,
            join_nonce=f"n{self._nonce}",
            backend="cpu",
            elastic=self.name == "bee",
        )
        call: Any = self._channel.unary_unary(f"{PATH}/Join", pb.JoinRequest.SerializeToString)
        with contextlib.suppress(grpc.RpcError):  # Somebody may have its name, or the run its number of workers.
            answer = pb.JoinResponse.FromString(call(request, timeout=20))
            self.session, self.worker_id = answer.session, answer.worker_id
            if self._stays:
                self._open()
        return True

    def wait_for_lease(self) -> None:
        assert self._leased.wait(30), "no lease came"

    def close(self) -> None:
        for stream in (self._stream, self._attached):
            if stream is not None:
                stream.cancel()

    def _is_member(self) -> bool:
        call: Any = self._channel.unary_unary(f"{PATH}/Heartbeat", pb.HeartbeatRequest.SerializeToString)
        try:
            call(
                pb.HeartbeatRequest(worker_id=max(0, self.worker_id)),
                timeout=20,
                metadata=(("ayni-session", self.session),),
            )
        except grpc.RpcError:
            return False
        return self.worker_id >= 0

    def _open(self) -> None:
        start: Any = self._channel.unary_stream(
            f"{PATH}/ShardAssignment",
            pb.ShardAssignmentRequest.SerializeToString,
            pb.ShardAssignmentResponse.FromString,
        )
        request = pb.ShardAssignmentRequest(worker_id=self.worker_id)
        self._stream = start(request, metadata=(("ayni-session", self.session),))
        threading.Thread(target=self._follow, args=(self._stream,), daemon=True).start()
        self._attach()

    def _attach(self) -> None:
        """Lends itself to calls over a stream of its own, and answers each of them."""
        start: Any = self._channel.stream_stream(
            f"{PATH}/Attach", pb.AttachRequest.SerializeToString, pb.AttachResponse.FromString
        )
        answers: queue.SimpleQueue[pb.AttachRequest] = queue.SimpleQueue()
        answers.put(pb.AttachRequest(hello=pb.AttachHello(worker_id=self.worker_id)))
        self._attached = start(iter(answers.get, None), metadata=(("ayni-session", self.session),))
        threading.Thread(target=self._answer, args=(self._attached, answers), daemon=True).start()

    def _answer(self, stream: Any, answers: "queue.SimpleQueue[Any]") -> None:
        with contextlib.suppress(grpc.RpcError):
            for frame in stream:
                if frame.HasField("call"):
                    reply = pb.AttachReply(call_id=frame.call.call_id, response=bytes(100))
                    answers.put(pb.AttachRequest(reply=reply))
                    answers.put(pb.AttachRequest(reply=pb.AttachReply(call_id=frame.call.call_id, last=True)))
        answers.put(None)

    def _follow(self, stream: Any) -> None:
        with contextlib.suppress(grpc.RpcError):
            for frame in stream:
                if frame.HasField("assignment"):
                    self.assignment = frame.assignment
                    self._leased.set()


def bases_of(method: str, member: Insider) -> Iterator[list[Message]]:
    """Requests of a method, frame by frame, that the server would take of a member now."""
    lease = member.assignment
    stats = [
        pb.MicrobatchStats(microbatch=m, weight=2, loss_sum=2.0, num_correct=1, num_predictions=2)
        for m in range(lease.microbatch_start, lease.microbatch_stop)
    ]
    key: dict[str, Any] = {"worker_id": member.worker_id, "epoch": lease.epoch, "step": lease.step}
    key |= {"attempt": lease.attempt, "lease_id": lease.lease_id}
    sizes = {"BlockGradient": [SIZE, *[0] * 8]}.get(method, [])
    tensor = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, num_elements=SIZE, component_sizes=sizes)
    round_ = pb.RoundBegin(**key, tensor=tensor, microbatches=stats)
    chunk = tensor_pb2.Chunk(data=bytes(SIZE * 4))
    if method == "Exchange":
        entry = collective_pb2.CollectiveHello(protocol_version=PROTOCOL_VERSION, group="alone", world_size=1)
        send = collective_pb2.CollectiveSend(to=[1], key=b"k", about="x", total_bytes=1, data=b"x")
        frames: list[Message] = [collective_pb2.ExchangeRequest(hello=entry)]
        yield [*frames, collective_pb2.ExchangeRequest(bye=collective_pb2.CollectiveBye())]
        yield [*frames, collective_pb2.ExchangeRequest(send=send)]
    elif method == "Join":
        yield [pb.JoinRequest(protocol_version=PROTOCOL_VERSION, worker_name="cat", join_nonce="n", backend="cpu")]
    elif method == "Gradient":
        yield [pb.GradientRequest(begin=pb.GradientBegin(round=round_)), pb.GradientRequest(chunk=chunk)]
    elif method == "BlockGradient":
        begin = pb.BlockGradientBegin(round=round_, block_index=1, num_blocks=2)
        yield [pb.BlockGradientRequest(begin=begin), pb.BlockGradientRequest(chunk=chunk)]
    elif method == "NonBlockGradient":
        component = pb.NonBlockGradientBegin(round=round_, component=pb.NON_BLOCK_COMPONENT_LM_HEAD)
        yield [pb.NonBlockGradientRequest(begin=component), pb.NonBlockGradientRequest(chunk=chunk)]
    elif method == "CommitStep":
        yield [pb.CommitStepRequest(**key, kind=pb.STEP_KIND_TRAIN, num_buckets=1, microbatches=stats)]
    elif method == "Lanes":
        names = ("Gradient", "CommitStep", "ShardAssignment")
        calls = [next(bases_of(name, member)) for name in names]
        methods = (pb.LANE_METHOD_GRADIENT, pb.LANE_METHOD_COMMIT_STEP, pb.LANE_METHOD_SHARD_ASSIGNMENT)
        for lanes in (slice(0, 2), slice(2, 3)):
            yield [_lanes(list(zip(methods, calls, strict=True))[lanes])]
    elif method == "Attach":
        hello = pb.AttachHello(worker_id=member.worker_id, epoch=lease.epoch)
        reply = pb.AttachReply(call_id=1, response=b"x", last=True)
        yield [pb.AttachRequest(hello=hello), pb.AttachRequest(reply=reply)]
    elif method == "ReadBlocks":
        yield [worker_pb2.ReadBlocksRequest(layout=worker_pb2.LayoutHandle(low=1, high=1))]
    elif method in ("ShardAssignment", "Heartbeat", "Leave"):
        yield [getattr(pb, f"{method}Request")(worker_id=member.worker_id)]


def _lanes(calls: "list[tuple[pb.LaneMethod.ValueType, list[Message]]]") -> pb.LanesRequest:
    """One message with a lane for each call."""
    return pb.LanesRequest(
        frames=[
            pb.LaneRequest(
                lane=number, method=method, messages=[f.SerializeToString() for f in frames], half_close=True
            )
            for number, (method, frames) in enumerate(calls, 1)
        ]
    )
