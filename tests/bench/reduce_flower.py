"""Rounds of the all-reduce bench by Flower: FedAvg over gRPC, with clients that have trained already.

Runs in Flower's own environment. Without `--address` it is the server, which drives; a turn is one fit round: the mean
of the round before goes out to every client, their vectors come in and are averaged.
"""

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from flwr.client import NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.client.app import start_client
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

from tests.bench.reduce_line import Vector, arguments, check, true_mean, vector

_TIMEOUT_S = 120.0


class Turns(FedAvg):
    """Waits for the bench before each round, and says how long the round took."""

    def __init__(self, workers: int, num_elements: int) -> None:
        super().__init__(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=workers,
            min_available_clients=workers,
            initial_parameters=ndarrays_to_parameters([np.zeros(num_elements, np.float32)]),
        )
        self._true, self._start = true_mean(workers, num_elements), 0.0

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        client_manager.wait_for(self.min_available_clients)
        if sys.stdin.readline() != "go\n":
            return []
        self._start = time.perf_counter()
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        mean, metrics = super().aggregate_fit(server_round, results, failures)
        seconds = time.perf_counter() - self._start
        assert not failures, f"clients failed: {failures}"
        assert mean
        error = check(parameters_to_ndarrays(mean)[0], self._true)
        print(json.dumps({"seconds": seconds, "error": error}), flush=True)
        return mean, metrics


class Trained(NumPyClient):
    """A client whose training takes no time."""

    def __init__(self, own: Vector) -> None:
        self._own = own

    def fit(self, parameters: Any, config: Any) -> tuple[list[Vector], int, dict]:
        return [self._own], 1, {}


def main() -> None:
    given = arguments().parse_args()
    if given.address:
        start_client(server_address=given.address, client=Trained(vector(given.rank, given.numel)).to_client())
        return
    address = f"127.0.0.1:{free_port()}"
    print(address, flush=True)
    start_server(
        server_address=address,
        config=ServerConfig(num_rounds=given.turns, round_timeout=_TIMEOUT_S),
        strategy=Turns(given.workers, given.numel),
    )


def free_port() -> int:
    """Returns a port that nobody has now: Flower does not say which one it was given."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
