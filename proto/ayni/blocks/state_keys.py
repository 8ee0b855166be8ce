"""Under which keys a run's train state is stored.  [core]"""

from collections.abc import Iterable

from ayni.blocks.sequence_hash import synthetic


def state_name(run_id: str, completed_steps: int) -> str:
    """Returns what a stored train state is called: the run, and the steps behind the state."""
    return f"train state/{run_id}/{completed_steps}"


def state_keys(run_id: str, completed_steps: int, blocks: Iterable[int]) -> list[bytes]:
    """Returns the keys of blocks of a train state. Block 0 is stored last: without it the state is not there."""
    name = state_name(run_id, completed_steps)
    return [bytes(synthetic(name, block)) for block in blocks]
