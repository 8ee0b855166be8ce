"""Coordinates one training run: membership, leases, the all-reduce, commits, artifacts and status."""
