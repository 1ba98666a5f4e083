"""Which samples share the statistics of batch norms: a part of what is computed, which no configuration tells alone.

On one process they are those of a micro batch, on several all of a step. Each checkpoint says how many that is.
"""

from __future__ import annotations

from kftrain.data.order import BatchPlan
from kftrain.errors import ConfigError
from kftrain.parallel.batch_norm import GlobalBatchNorms


def samples_together(norms: GlobalBatchNorms | None, plan: BatchPlan) -> int | None:
    """How many samples share statistics; None where the model has none."""
    if norms is None or not norms.are_trained:
        return None
    return plan.global_batch_size if plan.num_micro_batches == 1 else plan.micro_batch_rows


def require_same_samples(before: int | None, norms: GlobalBatchNorms, plan: BatchPlan) -> None:
    """Raises ConfigError where a run would go on with other samples together. `before`: of its last checkpoint.

    None: that does not say it, or its model had no such statistics.
    """
    now = samples_together(norms, plan)
    if before is None or now is None or (before == now and 1 in (plan.num_micro_batches, plan.num_ranks)):
        return
    whole = before == plan.global_batch_size
    processes = "" if whole else "one process and "
    raise ConfigError(
        f"the batch norms of this run take {before} samples at a time, and must not go on with others",
        where="train.micro_batch_size",
        value=f"{plan.micro_batch_rows} samples on each of {plan.num_ranks} processes",
        fix=f"go on with {processes}train.micro_batch_size={0 if whole else before}, or start a new run",
    )
