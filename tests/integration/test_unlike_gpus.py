"""What the coordinator makes of backend wgpu, of fallbacks, and of measurements."""

import asyncio

import grpc
import pytest

from ayni.errors import TooLarge
from ayni.v1 import coordinator_pb2 as pb
from tests.support.coordinator import coordinator, raw_worker, refusal

RUN = {"run_id": "raw", "num_steps": 2, "min_workers": 1, "batch": {"samples": 4, "microbatches": 2}}
MOST = 1 << 20


@pytest.mark.parametrize(("kind", "update"), [("wgpu", "host"), ("cuda", "device"), ("cpu", "device")])
def test_one_backend_is_one_kind_of_device_unless_it_is_wgpu(tmp_path, kind, update):
    async def scenario(address):
        async with raw_worker(address, "ant") as ant:
            await ant.join(backend=kind)
            ant.open_assignments()
            await ant.next_frame()
            assert ant.assignment.update == update

    with coordinator(tmp_path, RUN) as process:
        asyncio.run(scenario(process.address))


def test_status_shows_fallbacks_and_measurements_carry_what_was_asked_for(tmp_path):
    async def scenario(address):
        async with raw_worker(address, "ant") as ant:
            answer = await ant.stub.MeasureLink(pb.MeasureLinkRequest(padding=bytes(MOST), answer_bytes=MOST))
            assert answer.padding == bytes(MOST)
            assert (await ant.stub.MeasureLink(pb.MeasureLinkRequest())).padding == b""
            for request in (
                pb.MeasureLinkRequest(padding=bytes(MOST + 1)),
                pb.MeasureLinkRequest(answer_bytes=MOST + 1),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ant.stub.MeasureLink(request)
                assert isinstance(refusal(caught), TooLarge)
            await ant.join(backend="wgpu")
            ant.open_assignments()
            await ant.next_frame()
            await ant.stub.Heartbeat(pb.HeartbeatRequest(worker_id=ant.worker_id, cpu_fallbacks=3), timeout=10)
            run = await ant.stub.GetRun(pb.GetRunRequest(), timeout=10)
            assert [worker.cpu_fallbacks for worker in run.snapshot.workers] == [3]

    with coordinator(tmp_path, RUN) as process:
        asyncio.run(scenario(process.address))
