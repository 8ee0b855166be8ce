"""What a worker raises when the network, not a verdict, ends its work.  [core]

A verdict of the coordinator is an `ayni.errors.AyniError`. These are the rest.
"""

START_AGAIN = "start this worker again when the coordinator is back"
"""What helps a worker that can come back to a run."""


class TransportBroken(ConnectionError):
    """One call ended with a status that no Ayni service gives: the stream broke, and nobody decided anything.

    Attributes:
        code: name of the gRPC status code; empty when the stream ended without one.
    """

    def __init__(self, message: str, code: str = "") -> None:
        """Keeps the sentence and the code."""
        super().__init__(message)
        self.code = code


class CoordinatorLost(ConnectionError):
    """Membership is over because the coordinator is gone. Says who, since when, and what to do."""


class CoordinatorUnreachable(ConnectionError):
    """No first contact within the allowance."""


class NotACoordinator(ConnectionError):
    """Something answers at the address, but no coordinator of ours."""


class Interrupted(Exception):
    """This worker was told to stop."""
