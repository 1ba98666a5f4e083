"""The sections `train` and `optimizer`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

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


SCRATCH, CHAMPION = "scratch", "champion"
"""What `train.from` may be beside a version and an export."""

_VERSION = re.compile(r"v?(\d{1,9})", re.ASCII)


class InitialWeights(Section):
    """What `train.from` came to. Filled in when the run is opened, so that each later attempt has the same."""

    asked: str = ""
    """The `train.from` that this is the answer to; empty: nobody has looked yet."""
    origin: str = ""
    """What it is, for people."""
    export_uri: str = ""
    """Where the weights lie; empty: the training starts from scratch."""
    export_digest: str = ""
    """The digest of that export."""


class TrainConfig(Section):
    """How long and in what portions, and where from."""

    steps: Count = 400
    """Optimizer steps of the whole training."""
    start_from: str = Field(SCRATCH, alias="from")
    """Whose weights the training starts with, with a new optimizer: `scratch`, `champion` (the champion of the moment
    when the run is opened; where there is none yet, from scratch), a version of the registered model, the URI of a run
    or of an export."""
    initial_weights: InitialWeights = InitialWeights()
    """What `from` came to when the run was opened."""
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

    @field_validator("start_from", mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str) and not (text in (SCRATCH, CHAMPION) or _VERSION.fullmatch(text) or "/" in text):
            raise ValueError("it is scratch, champion, a version as 3 or v3, or the URI of a run or of an export")
        return text

    def starting_with(self, origin: str, export_uri: str = "", export_digest: str = "") -> TrainConfig:
        """The same, with what `from` came to; without an export that is to start from scratch."""
        found = InitialWeights(asked=self.start_from, origin=origin, export_uri=export_uri, export_digest=export_digest)
        return self.model_copy(update={"initial_weights": found})

    def without_weights(self) -> TrainConfig:
        """The same, of which nobody knows what `from` comes to."""
        return self.model_copy(update={"initial_weights": InitialWeights()})

    @property
    def from_champion(self) -> bool:
        """Whether it starts from whatever is champion."""
        return self.start_from == CHAMPION

    @property
    def from_scratch(self) -> bool:
        """Whether it starts from no other model."""
        return self.start_from == SCRATCH

    @property
    def from_version(self) -> int | None:
        """The version that `from` names, if it names one."""
        match = _VERSION.fullmatch(self.start_from)
        return int(match[1]) if match else None
