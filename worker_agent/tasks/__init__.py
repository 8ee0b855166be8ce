"""Tasks in tree; `worker_agent.training.load` finds them by name."""
