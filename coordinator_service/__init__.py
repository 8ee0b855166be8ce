"""Coordinates one training run: membership, leases, the all-reduce, commits, artifacts and status."""

import ayni  # noqa: F401  Before anything loads gRPC: it sets how much that writes.
