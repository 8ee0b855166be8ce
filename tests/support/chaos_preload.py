"""What agents need and take seconds to load, for the process that they are forked from."""

from worker_agent.training.update import warm_up

warm_up()
