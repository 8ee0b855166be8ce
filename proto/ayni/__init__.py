"""The contract that the coordinator and the workers share."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Version of the wire protocol; Join refuses another one and names both."""
