"""A process that commits step after step and says so, until it is killed or its disk is full.

Usage: store_writer.py PLACE RUN_ID [LIMIT_BYTES], with PLACE a folder of runs or an address of a database.
"""

import asyncio
import resource
import sys
from pathlib import Path

from coordinator_service.store import RunStore, open_database, open_folder
from coordinator_service.store_records import EpochRecord
from tests.support.commits import commit


def open_place(place: str, run_id: str, *, fresh: bool = False, to_read: bool = False) -> RunStore:
    if "://" in place:
        return open_database(place, run_id, fresh=fresh, to_read=to_read)
    return open_folder(Path(place) / run_id, fresh=fresh, to_read=to_read)


def epoch(number: int) -> EpochRecord:
    return EpochRecord(number=number, worker_names=("ant", "bee"), committed_steps=number, unix_time=0.5)


async def write(store: RunStore) -> None:
    step = store.committed_steps()
    while True:
        committing = asyncio.create_task(asyncio.to_thread(store.commit, commit(step)))
        await asyncio.sleep(0)
        store.begin_epoch(epoch(step + 1))
        await committing
        print(step, flush=True)
        step += 1


def main(place: str, run_id: str, limit: str = "") -> None:
    store = open_place(place, run_id)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    print("open", flush=True)
    try:
        asyncio.run(write(store))
    except OSError as error:
        print(f"refused {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
