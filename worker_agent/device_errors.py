"""Whether an error says that the device it computes on is gone.  [core]

No two libraries raise the same class for it, and most raise RuntimeError, so the text has to do. What a program of its
own does wrong (an illegal address, an assertion in a kernel, too little memory) is not in the list: it would happen
again.
"""

import re
from collections.abc import Iterator

from ayni.errors import AyniError

_CUDA = (
    "unspecified launch failure",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "CUDA-capable device.* busy or unavailable",
    "no CUDA-capable device",
    "the launch timed out",
    "context is destroyed",
    "hardware stack error",
    "GPU is lost",
    "unknown error",
)
"""How CUDA and HIP name it when a GPU has fallen off its bus, was reset, or was taken away."""
_SIGNS = re.compile(
    "|".join(
        (
            rf"(?:CUDA|HIP) error: (?:{'|'.join(_CUDA)})",
            # Vulkan's and Level Zero's own name; VkResult -4 is the same where only the number is told.
            r"ERROR_DEVICE_LOST",
            r"VkResult:? *-4\b",
            # wgpu, and what drivers say in words.
            r"device (?:is|was|has been) lost",
            r"\bdevice lost\b",
            # Metal, after a hang or a reset that another program caused.
            r"CommandBufferCallbackError(?:Hang|Timeout|InnocentVictim|AccessRevoked|DeviceRemoved)",
        )
    ),
    re.IGNORECASE,
)
_LONGEST = 200


def loss_told_by(error: BaseException) -> str:
    """Returns the line of an error, or of one that led to it, that says that the device is gone; else empty text.

    Errors of the network and refusals say nothing of this machine's device, whatever they quote.
    """
    for one in _chain(error):
        if isinstance(one, AyniError | OSError):
            return ""
        for line in str(one).splitlines():
            if _SIGNS.search(line):
                return line.strip()[:_LONGEST].rstrip(".")
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        yield one
        seen.append(one)
        one = one.__cause__ or one.__context__
