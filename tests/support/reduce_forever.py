"""A rank that reduces until something goes wrong, and says what.

Arguments: seconds that a collective may take; if it is to fail after the first one, with which exit code.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import worker_agent.integrations.c10d  # noqa: F401


def main(timeout: str, *_: str) -> None:
    dist.init_process_group("ayni", init_method="ayni://forever", timeout=timedelta(seconds=60))
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=float(timeout)))
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
            print("reduced", flush=True)
            if failing := sys.argv[2:]:
                # Nobody answers this one; a program that fails must end all the same.
                dist.irecv(torch.ones(1), src=1 - dist.get_rank())
                raise SystemExit(int(failing[0]))
    except Exception as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
