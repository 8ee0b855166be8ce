"""Ways to move blocks between workers."""
