"""Messages that come with pushes through NIXL.  [core]"""

import struct

_MESSAGE = struct.Struct("<4sQ")
_MAGIC = b"AYNN"


def write_message(number: int) -> bytes:
    """Returns the message that tells a number."""
    return _MESSAGE.pack(_MAGIC, number)


def read_message(message: bytes) -> int | None:
    """Returns the number that a message tells; None when it is not one of ours."""
    if len(message) != _MESSAGE.size or not message.startswith(_MAGIC):
        return None
    return int(_MESSAGE.unpack(message)[1])
