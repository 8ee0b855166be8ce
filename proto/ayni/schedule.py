"""Learning rate and clip factor of a step.  [core]

The cosine comes from the C library, whose last bit may differ between machines. What has to be the same everywhere is
therefore computed by the coordinator alone and sent with the commit. Workers compute a learning rate themselves only
for the inner steps of local updates, which are each worker's own.
"""

import math

from ayni.run_config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Returns the learning rate of a step.

    Linear warm-up over `warmup_steps` (the first step has 1 / warmup_steps of the peak), then constant, or half a
    cosine from the peak to `final_learning_rate`, which is reached at step num_steps. Without end (num_steps 0) it
    stays constant.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or num_steps == 0:
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    falling = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    return config.final_learning_rate + (config.learning_rate - config.final_learning_rate) * falling


def clip_factor(config: OptimizerConfig, gradient_norm: float) -> float:
    """Returns what the mean gradient is multiplied by, so that its norm is at most `clip_norm`; 1 if it is already."""
    if config.clip_norm == 0 or gradient_norm <= config.clip_norm:
        return 1.0
    return config.clip_norm / gradient_norm
