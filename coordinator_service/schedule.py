"""Learning rate and clip factor of a step: decided in one place, sent with the commit.  [core]"""

from ayni.schedule import clip_factor, learning_rate

__all__ = ["clip_factor", "learning_rate"]
