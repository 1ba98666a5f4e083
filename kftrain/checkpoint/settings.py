"""The section `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kftrain.settings.section import Amount, Count, KeepsTraining, Section


class CheckpointConfig(Section):
    """When state is saved and how much of it is kept."""

    interval_steps: KeepsTraining[Count] = 100
    """Steps between checkpoints; the last step is always saved."""
    interval_seconds: KeepsTraining[Annotated[float, Field(ge=0)]] = 0.0
    """A checkpoint is also due when so much time has passed since the last one was begun; 0: by steps alone."""
    keep_last: KeepsTraining[Count] = 2
    """Committed checkpoints that are kept."""
    keep_every: KeepsTraining[Amount] = 0
    """A checkpoint is also made at each multiple of this step, and kept for good; 0: none."""
    keep_best: KeepsTraining[str] = ""
    """A metric of the periodic evaluation. The checkpoint with its best value is kept whatever `keep_last` says, and is
    the one that is exported, evaluated and registered; empty: the last one is."""
    keep_best_goal: KeepsTraining[Literal["minimize", "maximize"] | None] = None
    """Which direction of it is better; empty: as `registry.goal` where that is of the same metric, and less of what the
    task calls its loss."""
    asynchronous: KeepsTraining[bool] = True
    """Write in the background while training goes on."""
    max_failed_saves: KeepsTraining[Amount] = 3
    """Checkpoints in a row that may fail to be written (a full disk, a storage that is away) while training goes on;
    one more ends the attempt, to be tried again (138). The last one of a training must not fail."""
    timeout_seconds: KeepsTraining[Annotated[float, Field(gt=0)]] = 3600.0
    """How long one checkpoint may take to be written. If it takes longer, storage hangs, and the attempt ends, to be
    tried again (138)."""
