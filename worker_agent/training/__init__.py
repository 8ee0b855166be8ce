"""Training: knows torch, does not know gRPC."""
