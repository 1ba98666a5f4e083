"""Runs a firing of a schedule in this process, as a rendered CronJob does, with the steps of the pipeline."""

from __future__ import annotations

import re
from datetime import datetime, timezone

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.errors import ConfigError, Preempted
from kftrain.schedule.settings import format_instant
from kftrain.stages.evaluate import evaluate
from kftrain.stages.finish import SUCCESS_STATES, finish
from kftrain.stages.outcome import Outcome
from kftrain.stages.register import register
from kftrain.stages.shard import shard_from_pipeline
from kftrain.stages.train import train

SCHEDULED = re.compile(r".*-(\d{8,9})")
"""Name of a Job that a CronJob has started: it ends with the time that was due, in minutes since 1970."""


def fire(config: Config, job: str, progress: Progress, now: datetime | None = None) -> Outcome:
    """Run all stages; a pod that runs again for the same `job` goes on with its run. Raises KftrainError.

    A Job that no CronJob has started is a run by hand. If a stage is told to stop (Preempted), the exit handler does
    not run: the next pod goes on.
    """
    if not config.schedule.name:
        raise ConfigError("the configuration belongs to no schedule", where="schedule.name", fix="render it anew")
    scheduled = SCHEDULED.fullmatch(job)
    minutes = int(scheduled.group(1)) if scheduled else 0
    created = datetime.fromtimestamp(minutes * 60, timezone.utc) if scheduled else now or datetime.now(timezone.utc)
    if not scheduled:
        by_hand = config.schedule.model_copy(update={"trigger": "manual"})
        config = config.model_copy(update={"schedule": by_hand})
    text, job_id = config.to_yaml(), storage.sha256_text(job)[:32]
    state = "FAILED"
    try:
        opened = shard_from_pipeline(text, {}, "", job_id, progress, created=format_instant(created))
        for stage in (train, evaluate, register):
            stage(opened.run_uri, progress)
        state = SUCCESS_STATES[0]
    except Preempted:
        state = ""
        raise
    finally:
        if state:
            outcome = finish(text, "", "", job_id, state, progress)
    return outcome
