"""The sections `train` and `optimizer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kftrain.settings.section import Amount, Count, Probability, Section


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    kind: Literal["adamw"] = "adamw"
    """The optimizer."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1.0e-3
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled weight decay; applied to matrices only, not to norms and biases."""
    beta1: Probability = 0.9
    """Decay of the first moment."""
    beta2: Probability = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1.0e-8
    """Added to the denominator."""
    schedule: Literal["warmup_cosine", "constant"] = "warmup_cosine"
    """`warmup_cosine`: linear warm-up, then a half cosine down to `final_learning_rate_fraction`."""
    warmup_steps: Amount = 50
    """Steps of linear warm-up; at most all of them."""
    final_learning_rate_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Learning rate at the last step, as a fraction of the peak."""


class TrainConfig(Section):
    """How long and in what portions."""

    steps: Count = 400
    """Optimizer steps of the whole training."""
    global_batch_size: Count = 32
    """Samples per optimizer step over all processes: the truth from which the rest is derived."""
    micro_batch_size: Amount = 0
    """Samples per forward pass of one process; 0: its whole share. A smaller value accumulates gradients."""
    gradient_clip_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Gradients are scaled down to this global norm; 0: no clipping."""
    activation_checkpointing: Literal["none", "blocks"] = "none"
    """`blocks`: recompute each block in the backward pass instead of keeping its activations."""
    log_interval_steps: Count = 10
    """Steps between two recorded points of loss, learning rate and speed."""
    max_nonfinite_steps: Amount = 0
    """Steps with a non-finite gradient norm that may be skipped in a row before the run ends as diverged (19)."""
