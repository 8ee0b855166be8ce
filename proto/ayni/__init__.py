"""The contract that the coordinator and the workers share."""

import os

# gRPC reads it when it is loaded. It writes to standard error by itself, past the logs and their format, for instance
# when a stranger's handshake fails; what concerns a call is in the call's error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Its handlers of fork() crash or stop the processes that a DataLoader with num_workers forks from a program that has
# joined a run. Those never speak gRPC, so they need none.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Version of the wire protocol; Join refuses another one and names both."""
