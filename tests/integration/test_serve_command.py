"""python -m worker_agent serve: starts, answers, stops; and what it says when it can't."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ayni.blocks.layouts import LocalLayout, Tier
from ayni.blocks.transfers import TransferOptions
from coordinator_service.worker_stub import GrpcBlockWorker
from tests.support.coordinator import TOKEN, environment

LAYOUTS = """
model: test
layouts:
  - {num_blocks: 8, num_layers: 2, inner_dim: 64, num_heads: 4}
  - {num_blocks: 8, num_layers: 2, inner_dim: 64, num_heads: 4, tier: host, axis_order: hnd}
  - {num_blocks: 8, num_layers: 2, inner_dim: 64, num_heads: 4, tier: disk}
"""


def start(folder: Path, *flags: str, layouts: str = LAYOUTS) -> subprocess.Popen:
    (folder / "layouts.yaml").write_text(layouts)
    command = [sys.executable, "-m", "worker_agent", "serve", "--layouts", "layouts.yaml", *flags]
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def failure(folder: Path, *flags: str, layouts: str = LAYOUTS) -> tuple[int, str]:
    process = start(folder, *flags, layouts=layouts)
    _, log = process.communicate(timeout=60)
    assert "Traceback" not in log
    return process.returncode, log


def test_it_serves_what_the_file_says_until_it_is_told_to_stop(tmp_path: Path):
    async def use(address: str) -> list[LocalLayout]:
        worker = GrpcBlockWorker.dial(address, TOKEN)
        device, host, disk = (LocalLayout(tier=tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))
        await worker.execute_local_transfer(device, host, range(4), range(4, 8))
        await worker.execute_local_transfer(host, disk, range(4, 8), range(4), TransferOptions(route="to disk"))
        (metadata,) = await worker.export_metadata()
        await worker.close()
        return [layout.place for layout in metadata.layouts]

    process = start(tmp_path)
    try:
        assert process.stdout
        address = process.stdout.readline().removeprefix("listening on ").strip()
        places = asyncio.run(asyncio.wait_for(use(address), 30))
        assert [place.tier for place in places] == [Tier.DEVICE, Tier.HOST, Tier.DISK]
        process.send_signal(signal.SIGTERM)
        rest, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, log
    assert rest == ""
    assert "Traceback" not in log
    assert "device layout to host layout: 4 blocks, 0.0 MB in 1 transfers; 0 blocks failed" in log
    assert "to disk: 4 blocks" in log
    assert (tmp_path / "ayni-blocks" / "rank0-resource0.slab").exists()


@pytest.mark.parametrize(
    ("layouts", "flags", "sentence"),
    [
        ("layouts: []", (), "layouts is empty"),
        (LAYOUTS.replace("num_heads: 4", "num_heads: 5"), (), "num_heads (5) must divide inner_dim (64)"),
        (LAYOUTS.replace("num_blocks: 8", "num_blocks: 99999999999"), (), "device layout: "),
        (LAYOUTS, ("--listen", "0.0.0.0:0"), "without TLS would show the join token"),
        (LAYOUTS, ("--blocks-engines", "rdma"), "engines has rdma; known are shm, nixl, grpc"),
        (LAYOUTS, ("--layouts", "missing.yaml"), "can't read missing.yaml"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(tmp_path: Path, layouts: str, flags: tuple[str, ...], sentence: str):
    code, log = failure(tmp_path, *flags, layouts=layouts)
    assert code == 2, log
    assert sentence in log
