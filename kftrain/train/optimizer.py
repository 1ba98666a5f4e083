"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and its learning rate, a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from kftrain.train.settings import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the model's parameters; weight decay on tensors of two and more dims only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
    _begin(optimizer)
    return optimizer


def _begin(optimizer: torch.optim.AdamW) -> None:
    """Gives each parameter the state that AdamW gives it at its first gradient.

    One that has had none yet, such as an expert that no token has reached, would be missing from a checkpoint, which
    then could not be loaded.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Learning rate of step `step`, counted from 0, of `num_steps`."""
    peak = config.learning_rate
    if config.schedule == "constant":
        return peak
    warmup_steps = min(config.warmup_steps, num_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    floor = config.final_learning_rate_fraction
    return peak * (floor + (1.0 - floor) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Gives all parameter groups this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = value
