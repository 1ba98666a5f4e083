"""Scheduled runs: which instant a run works for, why it may have nothing to do, and what is said when it has ended.

A run that has nothing to do succeeds: the first step writes `SKIPPED.json` into its folder. Kubeflow starts none of the
others then; elsewhere they end at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from kftrain import launch, report, storage
from kftrain.config import Config
from kftrain.errors import EmptyWindowError, FailureClass
from kftrain.launch.kubernetes.client import Cluster
from kftrain.launch.kubernetes.workflow import cluster_place, is_over
from kftrain.progress import Progress
from kftrain.run import documents, heartbeat
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.config import is_opened, read_config
from kftrain.run.documents import Document
from kftrain.run.error import ErrorDocument
from kftrain.run.paths import RunPaths
from kftrain.schedule import alert
from kftrain.schedule.settings import format_instant
from kftrain.schedule.state import BACKFILL, Firing, FiringEnd, History, Result, key_of, names_below
from kftrain.stages.outcome import Outcome
from kftrain.stages.windows import leave_behind, with_scheduled_window

SILENT_SECONDS = 30 * 60.0
"""After so long without a sign a run is taken for dead that no cluster answers for."""

Why = Literal["paused", "done", "overlap", "unchanged", "empty"]


class Skipped(Document):
    """`SKIPPED.json`: a scheduled run that had nothing to do."""

    why: Why
    line: str
    """In words."""


class Fired(Document):
    """`firing.json` in a run's folder: which firing it is."""

    schedule: str
    key: str
    job_id: str
    identity: str
    """Of what it trains."""


@dataclass(frozen=True)
class Begun:
    """A run that was started, by a schedule or by somebody."""

    config: Config
    """With the instant in it."""
    key: str = ""
    """Of its firing; empty: it belongs to no schedule, or is not the one that works for the instant."""
    skipped: Skipped | None = None
    """Why there is nothing to do."""


def begin(config: Config, paths: RunPaths, job_id: str, created: str, is_resumed: bool, progress: Progress) -> Begun:
    """Takes the instant that a run was due at, unless there is nothing to do. Nothing happens for other runs.

    Args:
        config: Of the run; its section `schedule` says which one it belongs to.
        paths: Of the run.
        job_id: The same for all pods of all steps of a pipeline run.
        created: When the pipeline run was created, in RFC 3339; anything else stands for now.
        is_resumed: It goes on with an earlier run, because somebody said so.
        progress: Takes a line at a time.

    Raises ConfigError, DataError for damaged documents, and RetryableError where storage is away.
    """
    schedule = config.schedule
    if not schedule.name:
        return Begun(config)
    history, moment = History.of(config.run.storage_root, schedule.name), _moment(created)
    asked, instant, trigger = config, schedule.due(moment), "manual" if is_resumed else schedule.trigger
    key = key_of(instant, moment, trigger, job_id)
    config = config.model_copy(
        update={"schedule": schedule.model_copy(update={"instant": format_instant(instant), "trigger": trigger})}
    )
    line = _pause(history, instant) if trigger == "cron" and key not in history.keys("firings") else ""
    if line:
        return _skip(config, "", "paused", line, progress)
    found = history.claim(key, _firing(instant, trigger, job_id, paths, moment))
    if found.job_id != job_id:
        line = f"what was due at {found.instant} is the work of {RunPaths(found.run_uri).run_id}"
        return _skip(config, "", "done", line, progress)
    before = read_skipped(paths)
    if before is not None and history.ended(key) is not None:  # another run may have begun where this one would
        return _skip(config, key, before.why, before.line, progress)
    others = {other: firing for other, firing in history.unended(progress).items() if other != key}
    beside = [firing for firing in others.values() if "backfill" not in (trigger, firing.trigger)]
    alive = next((firing for firing in beside if _lives(firing, moment)), None)
    if alive is not None:
        line = f"the run before, {RunPaths(alive.run_uri).run_id}, is still at work"
        return _skip(config, key, "overlap", line, progress)
    for other, firing in others.items():  # what was trained on is in no other window
        if _is_registered(RunPaths(firing.run_uri)):
            _close(history, other, firing, moment, progress)
    progress(f"schedule {schedule.name}: due at {format_instant(instant)}")
    placed = config if is_resumed else with_scheduled_window(asked, instant, paths.uri, progress)
    if placed is None:
        return _skip(config, key, "empty", f"all from before {format_instant(instant)} was trained on", progress)
    return Begun(placed.model_copy(update={"schedule": config.schedule}), key)


def empty(begun: Begun, error: EmptyWindowError, progress: Progress) -> Skipped:
    """That there is nothing to do, because nothing of the source lies in the window. Raises it in any other run."""
    if not begun.key:
        raise error
    progress(f"nothing to do: {error.line}")
    return Skipped(why="empty", line=error.line)


def unchanged(
    begun: Begun, config: Config, paths: RunPaths, dataset_digest: str, job_id: str, progress: Progress
) -> Skipped | None:
    """Why there is nothing to do for a run whose dataset is there; None: it trains. Notes which firing it is."""
    schedule = config.schedule
    if not begun.key:
        return None
    identity = _identity(config, dataset_digest)
    fired = Fired(schedule=schedule.name, key=begun.key, job_id=job_id, identity=identity)
    storage.publish_json(_fired_uri(paths), fired.to_dict())
    if not schedule.skip_unchanged or config.data.window.watermark:  # nothing was trained on what follows one
        return None
    last = History.of(paths.storage_root, schedule.name).last_trained()
    if last is None or last.identity != identity or last.run_uri == paths.uri:
        return None
    line = f"nothing has changed since {RunPaths(last.run_uri).run_id}: data, model and settings are the same"
    return _skip(begun.config, begun.key, "unchanged", line, progress).skipped


def leave_skipped(paths: RunPaths, begun: Begun, skipped: Skipped, job_id: str, progress: Progress) -> Outcome:
    """Notes in a run's folder that it has nothing to do, and ends its firing: the next one may begin at once."""
    storage.publish_json(paths.skipped, skipped.to_dict())
    if begun.key:
        end(begun.config, paths, job_id, None, progress)
    return _outcome(paths, skipped)


def skipped_outcome(paths: RunPaths, progress: Progress) -> Outcome | None:
    """What a later step returns for a run that has nothing to do; None: there is something."""
    skipped = read_skipped(paths)
    if skipped is None:
        return None
    progress(f"nothing to do: {skipped.line}")
    return _outcome(paths, skipped)


def read_skipped(paths: RunPaths) -> Skipped | None:
    """Why a run has nothing to do; None: it has. Raises DataError where the document is damaged."""
    return documents.read_if_exists(Skipped, paths.skipped)


def end(config: Config, paths: RunPaths, job_id: str, error: ErrorDocument | None, progress: Progress) -> None:
    """Says how a scheduled run has ended, counts failures, pauses the schedule and alerts. What fails is a warning."""
    schedule = config.schedule
    if not schedule.name:
        return
    with best_effort("what became of the schedule could not be recorded", REPORT_SECONDS):
        fired = documents.read_if_exists(Fired, _fired_uri(paths))
        own = fired if fired is not None and fired.job_id == job_id else None
        history = History.of(config.run.storage_root, schedule.name)
        key, identity = (own.key, own.identity) if own else (history.key_of(job_id), "")
        result, line = _result(error, read_skipped(paths) if error is None else None)
        if key:
            ended = FiringEnd(
                result=result, line=line, job_id=job_id, run_uri=paths.uri, time=time.time(), identity=identity
            )
            record(config, history, key, ended, progress)


def record(config: Config, history: History, key: str, ended: FiringEnd, progress: Progress) -> None:
    """Records how a firing has ended; the first to do so counts, pauses and alerts. Before, the watermark is moved."""
    schedule, name, paths = config.schedule, history.name, RunPaths(ended.run_uri)
    is_over = ended.result == "trained" or _is_registered(paths)
    if config.data.window.watermark and (is_over or (ended.result == "skipped" and _has_empty_window(config, paths))):
        leave_behind(config, paths, progress)
    if not history.end(key, ended) or ended.result != "failed" or BACKFILL in key:  # who has started that follows it
        return
    count = history.failures_in_a_row()
    line = f"{name} has failed: {ended.line}"
    if schedule.pause_after_failures and count >= schedule.pause_after_failures:
        why = f"{count} failures in a row, the last: {ended.line}"
        if history.add("paused", why):
            line = f"{name} is paused after {why}; to go on: kftrain schedule resume"
            progress(line)
    alert.send(line, link(config, ended), schedule.alert_over_http, progress)


def _has_empty_window(config: Config, paths: RunPaths) -> bool:
    """Whether nothing was in a window that could have ended later: else the rest would never come."""
    skipped, data = read_skipped(paths), config.data
    is_one = data.window.by != "column" or len(data.windowed_sources) == 1  # of several one may have records there
    return skipped is not None and skipped.why == "empty" and config.schedule.max_window_hours > 0 and is_one


def close_lost(
    cluster: Cluster, storage_root: str, now: datetime, dry_run: bool, progress: Progress
) -> list[tuple[str, str]]:
    """Ends firings below a storage root that nobody works on and nobody has ended: (schedule, run) of each.

    What is left of a run that was deleted, or whose last pod was killed, which counts as a failure.
    """
    found = []
    for name in names_below(storage_root):
        history = History.of(storage_root, name)
        for key, firing in history.unended(progress).items():
            if not _is_lost(cluster, firing, now):
                continue
            found.append((name, firing.run_uri))
            if not dry_run:
                is_gone = bool(firing.workflow) and cluster.read_workflow(firing.workflow) is None
                _close(history, key, firing, now, progress, is_gone)
    return found


def _close(
    history: History, key: str, firing: Firing, now: datetime, progress: Progress, is_gone: bool = False
) -> None:
    """Ends a firing in the place of its run. `is_gone`: somebody has deleted its Workflow."""
    paths, line = RunPaths(firing.run_uri), "the run was deleted"
    result: Result = "canceled" if is_gone else "failed"
    if not is_gone:
        line = "the run has ended without saying why: it was deleted, or its last pod was killed"
    ended = FiringEnd(result=result, line=line, job_id=firing.job_id, run_uri=firing.run_uri, time=now.timestamp())
    if _is_registered(paths):
        identity = documents.read(Fired, _fired_uri(paths)).identity
        ended = ended.model_copy(update={"result": "trained", "line": "the run succeeded", "identity": identity})
    config = read_config(paths) if is_opened(paths) else Config()
    record(config, history, key, ended, progress)


def _is_lost(cluster: Cluster, firing: Firing, now: datetime) -> bool:
    """Whether nobody works on a firing: a Workflow of this cluster says it, one of another cluster is left alone."""
    if firing.workflow:
        return firing.cluster == cluster_place(cluster) and bool(is_over(cluster, firing.workflow))
    return not _lives(firing, now)


def link(config: Config, ended: FiringEnd) -> str:
    """Where people see what has happened: the run in Kubeflow's UI, else its folder."""
    url = config.tracking.kubeflow_url.rstrip("/")
    return f"{url}/#/runs/details/{ended.job_id}" if url else ended.run_uri


def _identity(config: Config, dataset_digest: str) -> str:
    """What a run trains. Initial weights count as they are asked for: a new champion alone is nothing to train on."""
    asked = config.model_copy(update={"train": config.train.without_weights()})
    return storage.digest_json({**asked.training_identity(dataset_digest), "from": config.train.start_from})


def _result(error: ErrorDocument | None, skipped: Skipped | None) -> tuple[Result, str]:
    if error is not None:
        canceled = error.failure_class in (FailureClass.TERMINATED, FailureClass.INTERRUPTED)
        return ("canceled" if canceled else "failed"), error.line
    return ("skipped", skipped.line) if skipped is not None else ("trained", "the run succeeded")


def _pause(history: History, instant: datetime) -> str:
    """Why a schedule does not run what was due at an instant: it is paused, or was resumed later; empty: it does.

    Kubeflow and CronJobs start what they have missed last as soon as they are let go on.
    """
    event, due = history.last_event(), format_instant(instant)
    if event is not None and event.kind == "paused":
        return f"the schedule {history.name} is paused: {event.line}"
    if event is not None and instant.timestamp() < event.time:
        return f"this was due at {due}, before the schedule {history.name} was resumed"
    return ""


def _firing(instant: datetime, trigger: str, job_id: str, paths: RunPaths, created: datetime) -> Firing:
    workflow, cluster = launch.pipeline_place()
    return Firing(
        instant=format_instant(instant),
        trigger=trigger,
        job_id=job_id,
        run_uri=paths.uri,
        created=created.timestamp(),
        workflow=workflow,
        cluster=cluster,
    )


def _lives(firing: Firing, now: datetime) -> bool:
    """Whether a run is at work: its Workflow knows, else its last sign of life says it."""
    if firing.workflow:
        is_over = launch.is_pipeline_over(firing.workflow, firing.cluster)
        if is_over is not None:
            return not is_over
    beat = heartbeat.last_beat(RunPaths(firing.run_uri))
    return now.timestamp() - max(firing.created, beat) < SILENT_SECONDS


def _moment(created: str) -> datetime:
    try:
        found = datetime.fromisoformat(created.replace("Z", "+00:00"))
    except ValueError:
        found = datetime.now(timezone.utc)
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def _skip(config: Config, key: str, why: Why, line: str, progress: Progress) -> Begun:
    progress(f"nothing to do: {line}")
    return Begun(config, key, Skipped(why=why, line=line))


def _is_registered(paths: RunPaths) -> bool:
    """Whether a scheduled run has come to its end, whatever was said of it."""
    return storage.exists(paths.registration) and storage.exists(_fired_uri(paths))


def _outcome(paths: RunPaths, skipped: Skipped) -> Outcome:
    return Outcome(
        run_uri=paths.uri,
        summary={"result": f"nothing to do: {skipped.line}", "run_uri": paths.uri, "why": skipped.why},
        next_step="finish",
        html=report.skipped_html(paths.uri, skipped.line),
        markdown=report.skipped_markdown(paths.uri, skipped.line),
    )


def _fired_uri(paths: RunPaths) -> str:
    return storage.join(paths.uri, "firing.json")
