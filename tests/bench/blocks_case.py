"""Measures one case of the block bench in a process of its own: `python blocks_case.py CASE FOLDER [--quick]`.

Leaves one JSON object in the folder's result.json: rows, samples, and what was left out and why. Not on standard
output, where libraries write as well.
"""

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from ayni.rpc import tune_allocator
from tests.bench import (
    blocks_faults,
    blocks_local,
    blocks_mooncake,
    blocks_objects,
    blocks_overhead,
    blocks_remote,
    blocks_slab,
)
from tests.bench.blocks_measure import CaseResult, Scale

RESULT = "result.json"
Measure = Callable[[Path, Scale], Awaitable[CaseResult]]

CASES: dict[str, Measure] = {
    "local": blocks_local.local,
    "grpc": blocks_remote.grpc,
    "grpc-tls": blocks_remote.grpc_tls,
    "shm": blocks_remote.shm,
    "nixl": blocks_remote.nixl,
    "nixl-tcp": blocks_remote.nixl_tcp,
    "mooncake": blocks_mooncake.mooncake,
    "overhead": blocks_overhead.overhead,
    "file-store": blocks_objects.file_store,
    "s3": blocks_objects.s3,
    "slab": blocks_slab.slab,
    "faults": blocks_faults.faults,
}


def main() -> None:
    tune_allocator()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    result = asyncio.run(_run(CASES[given.case](given.folder, Scale(quick=given.quick))))
    (given.folder / RESULT).write_text(json.dumps(asdict(result)))


async def _run(case: Awaitable[CaseResult]) -> CaseResult:
    return await case


if __name__ == "__main__":
    main()
