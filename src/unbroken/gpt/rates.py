"""The learning rate as a pure function of the step: nothing to save, so nothing to restore wrongly.

``step`` counts the steps completed before this one. The warmup rises in equal parts and reaches the peak with its last
step; the decay then falls from the peak to ``min_lr_ratio`` of it and stays there.
"""

import math

from unbroken.config.optimizer import OptimizerConfig


def rate_at(step: int, optimizer: OptimizerConfig, max_steps: int) -> float:
    """The learning rate of one step."""
    peak = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * ((step + 1) / optimizer.warmup_steps)
    return peak * _share(step, optimizer, max_steps)


def _share(step: int, optimizer: OptimizerConfig, max_steps: int) -> float:
    """The share of the peak after the warmup."""
    decay_steps = optimizer.resolved_decay_steps(max_steps)
    begins = max_steps - decay_steps if optimizer.schedule == "wsd" else optimizer.warmup_steps
    # Both ends of the decay are reached: its first step has the whole peak, its last the minimum.
    done = min(max((step - begins) / max(1, decay_steps - 1), 0.0), 1.0)
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if optimizer.schedule == "cosine" else 1.0 - done
    return optimizer.min_lr_ratio + (1.0 - optimizer.min_lr_ratio) * left
