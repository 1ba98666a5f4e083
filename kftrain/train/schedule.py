"""Learning rates: pure functions of the step, so that nothing of them is saved."""

from __future__ import annotations

import math

from kftrain.train.settings import OptimizerConfig

TIMES_DECAYED = 10
"""`warmup_stable_decay` falls over the last of so many parts of the steps, unless the configuration says how many."""


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Learning rate of step `step`, counted from 0, of `num_steps`."""
    peak, schedule = config.learning_rate, config.schedule
    if schedule == "constant":
        return peak
    warmup_steps = min(config.warmup_steps, num_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "warmup_constant":
        return peak
    if schedule == "warmup_inverse_sqrt":  # Vaswani et al. 2017, arXiv:1706.03762, section 5.3
        return peak * math.sqrt(max(1, warmup_steps) / (step + 1))
    first, floor = warmup_steps, config.final_learning_rate_fraction
    if schedule == "warmup_stable_decay":  # Hu et al. 2024, arXiv:2404.06395; the decay is linear
        decay_steps = min(config.decay_steps or math.ceil(num_steps / TIMES_DECAYED), num_steps - warmup_steps)
        first = num_steps - decay_steps - 1  # the last one before the fall
    progress = min(1.0, max(0, step - first) / max(1, num_steps - 1 - first))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "warmup_cosine" else 1.0 - progress
    return peak * (floor + (1.0 - floor) * left)
