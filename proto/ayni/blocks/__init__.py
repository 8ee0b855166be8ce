"""Values of the block half that both services name: layouts, transfers, stored objects, and what a worker can do."""
