"""The section `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kftrain.settings.section import Amount, Count, KeepsTraining, Section


class CheckpointConfig(Section):
    """Checkpoints: how often they are written, and which are kept."""

    interval_steps: KeepsTraining[Count] = 100
    """Steps between checkpoints; the last step is always saved."""
    interval_seconds: KeepsTraining[Annotated[float, Field(ge=0)]] = 0.0
    """Time between the starts of two checkpoints, in addition to `interval_steps`; 0 counts steps only."""
    keep_last: KeepsTraining[Count] = 2
    """Number of the newest checkpoints to keep."""
    keep_every: KeepsTraining[Amount] = 0
    """Checkpoints at multiples of this step are also written, and never deleted; 0 disables this."""
    keep_best: KeepsTraining[str] = ""
    """Metric of the periodic evaluation that chooses the best checkpoint. That checkpoint is kept whatever `keep_last`
    says, and is the one to be exported, evaluated and registered. Empty: the last checkpoint is chosen."""
    keep_best_goal: KeepsTraining[Literal["minimize", "maximize"] | None] = None
    """Better direction of that metric. Empty: the direction of `registry.goal` if that is for the same metric, and
    `minimize` for the task's loss."""
    asynchronous: KeepsTraining[bool] = True
    """Write checkpoints in the background while training continues."""
    max_failed_saves: KeepsTraining[Amount] = 3
    """Checkpoints in a row that may fail to be written (full disk, unreachable storage) while training continues. One
    more ends the attempt as retryable (138), and so does a failure of the last checkpoint of a training."""
    timeout_seconds: KeepsTraining[Annotated[float, Field(gt=0)]] = 3600.0
    """Time limit for writing one checkpoint. A slower write counts as hanging storage and ends the attempt as retryable
    (138)."""
