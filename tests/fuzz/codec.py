"""Damaged frames at the hand-written codec, compared with the generated classes.

    python tests/fuzz/codec.py [--seconds 60] [--seed N]

Guided by coverage where atheris is installed (pip install -e '.[fuzz]'); without it by Hypothesis, which finds less.
Ends with 1 and the bytes that it found when a frame is read wrongly or an error comes that is no refusal.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LONGEST = 4_096
"""Bytes of a frame that coverage is looked for with."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    try:
        import atheris
    except ImportError:
        print("codec: atheris is not installed; pip install -e '.[fuzz]' finds more", file=sys.stderr)
        return with_hypothesis(given.seconds, given.seed)
    return with_atheris(atheris, given.seconds, given.seed)


def with_atheris(atheris, seconds: int, seed: int) -> int:
    """Does not return: libFuzzer ends the process, with 0 when the time is over."""
    with atheris.instrument_imports(include=["ayni.frames", "worker_agent.blocks.frames"]):
        from tests.support import fuzz_codec
        from worker_agent.blocks import frames as block_frames

    def one(data: bytes) -> None:
        provider = atheris.FuzzedDataProvider(data)
        kind = provider.ConsumeIntInRange(0, 3)
        if kind < 2:
            fuzz_codec.CHECKS[kind](data[:-1])
            return
        numbers = [provider.ConsumeUInt(8) for _ in range(3)]
        payload = provider.ConsumeBytes(300)
        if kind == 2:
            crc32 = numbers[2] & 0xFFFFFFFF if provider.ConsumeBool() else None
            fuzz_codec.check_gradient_round_trip(numbers[0], numbers[1] & 0xFFFFFFFF, crc32, payload)
            return
        head = block_frames.ChunkHead(
            stream_offset_bytes=numbers[0],
            index=numbers[1],
            blocks=provider.ConsumeIntListInRange(provider.ConsumeIntInRange(0, 20), 0, 2**64 - 1),
            layers=(numbers[2] & 0xFFFFFFFF, numbers[2] >> 32),
        )
        fuzz_codec.check_block_round_trip(head, [payload, payload[:3]], provider.ConsumeBool())

    folder = Path(tempfile.mkdtemp(prefix="ayni-corpus-"))
    for number, frame in enumerate(fuzz_codec.corpus()):
        for kind in range(2):  # The kind is taken from the last byte.
            (folder / f"{number}-{kind}").write_bytes(frame + bytes([kind]))
    arguments = [sys.argv[0], f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={LONGEST}"]
    atheris.Setup([*arguments, "-verbosity=0", f"-artifact_prefix={folder}/", str(folder)], one)
    atheris.Fuzz()
    return 0


def with_hypothesis(seconds: int, seed: int) -> int:
    import hypothesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    from tests.support import fuzz_codec
    from tests.support.fuzz_values import draw_message
    from tests.support.fuzz_wire import draw_damaged

    messages = [message.DESCRIPTOR for message in (*fuzz_codec.GRADIENTS, *fuzz_codec.BLOCKS)]

    @st.composite
    def frames(draw) -> bytes:
        return draw_damaged(draw, draw_message(draw, draw(st.sampled_from(messages)), {}).SerializeToString())

    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:

        @hypothesis.seed(seed + number)
        @settings(
            max_examples=500,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(data=frames() | st.binary(max_size=200))
        def check(data: bytes) -> None:
            for one in fuzz_codec.CHECKS:
                one(data)

        check()
        number += 1
    print(f"codec: {number * 500} frames, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
