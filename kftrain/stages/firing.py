"""Scheduled runs: which instant a run works for, why it may have nothing to do, and what is said when it has ended.

A run that has nothing to do succeeds: the first step writes `SKIPPED.json` into its folder. Kubeflow starts none of the
others then; elsewhere they end at once.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal
from urllib.parse import urlsplit

from kftrain import launch, reports
from kftrain.config import ORDERS, Config
from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.errors import EmptyWindowError, FailureClass
from kftrain.launch.kubernetes.client import Cluster
from kftrain.launch.kubernetes.workflow import is_over, name_cluster_place
from kftrain.run import documents, heartbeat
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.config import is_opened, read_config
from kftrain.run.documents import Document
from kftrain.run.error import ErrorDocument
from kftrain.run.paths import RunPaths
from kftrain.schedule.settings import format_instant
from kftrain.schedule.state import BACKFILL, Firing, FiringEnd, History, Result, build_key, list_schedules
from kftrain.stages.outcome import Outcome
from kftrain.stages.windows import pass_window, with_scheduled_window

SILENT_SECONDS = 30 * 60.0
"""Seconds without a sign of life after which a run is taken for dead, if no cluster can tell."""

ALERT_URL_ENV = "KFTRAIN_ALERT_URL"
"""Key of the secret `kftrain-alert`, and the variable that it becomes: the URL of a webhook, which is shown nowhere."""

ALERT_TIMEOUT_SECONDS = 10.0

Why = Literal["paused", "done", "overlap", "unchanged", "empty"]


class Skipped(Document):
    """`SKIPPED.json`: the reason why a scheduled run had nothing to do."""

    why: Why
    line: str
    """The reason in a sentence for people."""


class Fired(Document):
    """`firing.json` in a run's folder: the firing of a schedule that the run works for."""

    schedule: str
    key: str
    job_id: str
    identity: str
    """Digest of data, model and settings: equal digests train the same."""


@dataclass(frozen=True)
class Begun:
    """A run that was started, by a schedule or by a person."""

    config: Config
    """The run's configuration, with the instant that it works for."""
    key: str = ""
    """Key of its firing; empty: it belongs to no schedule, or another run works for the instant."""
    skipped: Skipped | None = None
    """The reason why there is nothing to do, if so."""


def begin(config: Config, paths: RunPaths, job_id: str, created: str, is_resumed: bool, progress: Progress) -> Begun:
    """Claim the instant that a scheduled run was due at, and find out whether it has anything to do.

    A run that belongs to no schedule passes unchanged; of a schedule that is paused nothing is claimed. `job_id` is the
    same for all pods of all steps of a pipeline run; `created`: when that was created, in RFC 3339, other text stands
    for now; `is_resumed`: a person makes it go on with an earlier run.

    Raises ConfigError, DataError for damaged documents, and RetryableError if storage is away.
    """
    schedule = config.schedule
    if not schedule.name:
        return Begun(config)
    history, moment = History.of(config.run.storage_root, schedule.name), _parse_moment(created)
    original, instant, trigger = config, schedule.due(moment), "manual" if is_resumed else schedule.trigger
    key = build_key(instant, moment, trigger, job_id)
    config = config.model_copy(
        update={"schedule": schedule.model_copy(update={"instant": format_instant(instant), "trigger": trigger})}
    )
    line = _explain_pause(history, instant) if trigger == "cron" and key not in history.list_keys("firings") else ""
    if line:
        return _make_skipped(config, "", "paused", line, progress)
    # Claim first, then look for other runs: of two at the same moment at least one sees the claim of the other and
    # skips. Both may, and the next firing trains; that both train at once cannot be.
    claimed = history.claim(key, _make_firing(instant, trigger, job_id, paths, moment))
    if claimed.job_id != job_id:
        line = f"what was due at {claimed.instant} is the work of {RunPaths(claimed.run_uri).run_id}"
        return _make_skipped(config, "", "done", line, progress)
    before = read_skipped(paths)
    # A pod that runs again after its firing was ended: the next run may be at work already, where this one would begin.
    if before is not None and history.read_end(key) is not None:
        return _make_skipped(config, key, before.why, before.line, progress)
    others = {other: firing for other, firing in history.read_unended(progress).items() if other != key}
    beside = [firing for firing in others.values() if "backfill" not in (trigger, firing.trigger)]
    alive = next((firing for firing in beside if _is_at_work(firing, moment)), None)
    if alive is not None:
        line = f"the run before, {RunPaths(alive.run_uri).run_id}, is still at work"
        return _make_skipped(config, key, "overlap", line, progress)
    # Runs that have registered a model and were killed before they said so: their ends are recorded now, which moves
    # the watermark. Else this run's window would begin where theirs did.
    for other, firing in others.items():
        if _is_registered(RunPaths(firing.run_uri)):
            _close(history, other, firing, moment, progress)
    progress(f"schedule {schedule.name}: due at {format_instant(instant)}")
    placed = config if is_resumed else with_scheduled_window(original, instant, paths.uri, progress)
    if placed is None:
        return _make_skipped(
            config, key, "empty", f"all from before {format_instant(instant)} was trained on", progress
        )
    return Begun(placed.model_copy(update={"schedule": config.schedule}), key)


def skip_empty_window(begun: Begun, error: EmptyWindowError, progress: Progress) -> Skipped:
    """Return that nothing of the source lies in the window of a scheduled run; raise `error` again in any other run."""
    if not begun.key:
        raise error
    progress(f"nothing to do: {error.line}")
    return Skipped(why="empty", line=error.line)


def skip_unchanged(
    begun: Begun, config: Config, paths: RunPaths, dataset_digest: str, job_id: str, progress: Progress
) -> Skipped | None:
    """Return a reason to skip a scheduled run that would train what was trained last, else None.

    Also notes in the run's folder which firing it is.
    """
    schedule = config.schedule
    if not begun.key:
        return None
    identity = _digest_identity(config, dataset_digest)
    fired = Fired(schedule=schedule.name, key=begun.key, job_id=job_id, identity=identity)
    storage.publish_json(_fired_uri(paths), fired.to_dict())
    if not schedule.skip_unchanged or config.data.window.watermark:  # nothing was trained on what follows one
        return None
    last = History.of(paths.storage_root, schedule.name).read_last_trained()
    if last is None or last.identity != identity or last.run_uri == paths.uri:
        return None
    line = f"nothing has changed since {RunPaths(last.run_uri).run_id}: data, model and settings are the same"
    return _make_skipped(begun.config, begun.key, "unchanged", line, progress).skipped


def leave_skipped(paths: RunPaths, begun: Begun, skipped: Skipped, job_id: str, progress: Progress) -> Outcome:
    """Note in a run's folder that it has nothing to do, and end its firing, so that the next one may begin at once."""
    storage.publish_json(paths.skipped, skipped.to_dict())
    if begun.key:
        end_firing(begun.config, paths, job_id, None, progress)
    return _make_outcome(paths, skipped)


def find_skipped_outcome(paths: RunPaths, progress: Progress) -> Outcome | None:
    """Return the outcome of a later step of a run that has nothing to do; None if the step has work."""
    skipped = read_skipped(paths)
    if skipped is None:
        return None
    progress(f"nothing to do: {skipped.line}")
    return _make_outcome(paths, skipped)


def read_skipped(paths: RunPaths) -> Skipped | None:
    """Read why a run has nothing to do; None if it has work. Raises DataError if the document is damaged."""
    return documents.read_if_exists(Skipped, paths.skipped)


def end_firing(config: Config, paths: RunPaths, job_id: str, error: ErrorDocument | None, progress: Progress) -> None:
    """End the firing of a scheduled run: record its result, count failures, pause the schedule and alert.

    Nothing fails here: an error becomes a warning.
    """
    schedule = config.schedule
    if not schedule.name:
        return
    with best_effort("what became of the schedule could not be recorded", REPORT_SECONDS):
        fired = documents.read_if_exists(Fired, _fired_uri(paths))
        own = fired if fired is not None and fired.job_id == job_id else None
        history = History.of(config.run.storage_root, schedule.name)
        key, identity = (own.key, own.identity) if own else (history.find_key(job_id), "")
        result, line = _classify_end(error, read_skipped(paths) if error is None else None)
        if key:
            ended = FiringEnd(
                result=result, line=line, job_id=job_id, run_uri=paths.uri, time=time.time(), identity=identity
            )
            record_end(config, history, key, ended, progress)


def record_end(config: Config, history: History, key: str, ended: FiringEnd, progress: Progress) -> None:
    """Record how a firing has ended; only the first process to do so counts failures, pauses and alerts.

    The watermark is moved first, by every process that comes here, which is one move: it is the run's own. Once the end
    is recorded, nobody comes back to move it.
    """
    schedule, name, paths = config.schedule, history.name, RunPaths(ended.run_uri)
    is_over = ended.result == "trained" or _is_registered(paths)
    if config.data.window.watermark and (is_over or (ended.result == "skipped" and _has_empty_window(config, paths))):
        pass_window(config, paths, progress)
    # Nobody is told of a failed run of an earlier window: who has started it follows it.
    if not history.write_end(key, ended) or ended.result != "failed" or BACKFILL in key:
        return
    count = history.count_failures_in_a_row()
    line = f"{name} has failed: {ended.line}"
    if schedule.pause_after_failures and count >= schedule.pause_after_failures:
        why = f"{count} failures in a row, the last: {ended.line}"
        if history.add_event("paused", why):
            line = f"{name} is paused after {why}; to go on: kftrain schedule resume"
            progress(line)
    send_alert(line, choose_link(config, ended), schedule.alert_over_http, progress)


def _has_empty_window(config: Config, paths: RunPaths) -> bool:
    """Return True if a run's window was empty and `max_window_hours` may have cut it short.

    The watermark must pass such a window: else every later run would read it again, and never what comes after it. One
    empty source empties the run, and what the others hold there must not be lost: a file that no run has read counts as
    late in the next window, but records of a column in a file that was read before do not.
    """
    skipped, data = read_skipped(paths), config.data
    is_safe = data.window.by != "column" or len(data.windowed_sources) == 1
    return skipped is not None and skipped.why == "empty" and config.schedule.max_window_hours > 0 and is_safe


def close_lost(
    cluster: Cluster, storage_root: str, now: datetime, dry_run: bool, progress: Progress
) -> list[tuple[str, str]]:
    """End the firings below a storage root that nobody works on and nobody has ended; return (schedule, run) of each.

    They are left by runs that were deleted, or whose last pod was killed, which counts as a failure.
    """
    closed = []
    for name in list_schedules(storage_root):
        history = History.of(storage_root, name)
        for key, firing in history.read_unended(progress).items():
            if not _is_lost(cluster, firing, now):
                continue
            closed.append((name, firing.run_uri))
            if not dry_run:
                is_gone = bool(firing.workflow) and cluster.read_workflow(firing.workflow) is None
                _close(history, key, firing, now, progress, is_gone)
    return closed


def _close(
    history: History, key: str, firing: Firing, now: datetime, progress: Progress, is_gone: bool = False
) -> None:
    """End a firing in the place of its run. `is_gone`: somebody has deleted its Workflow, which is no failure."""
    paths, line = RunPaths(firing.run_uri), "the run was deleted"
    result: Result = "canceled" if is_gone else "failed"
    if not is_gone:
        line = "the run has ended without saying why: it was deleted, or its last pod was killed"
    ended = FiringEnd(result=result, line=line, job_id=firing.job_id, run_uri=firing.run_uri, time=now.timestamp())
    if _is_registered(paths):
        identity = documents.read(Fired, _fired_uri(paths)).identity
        ended = ended.model_copy(update={"result": "trained", "line": "the run succeeded", "identity": identity})
    config = read_config(paths) if is_opened(paths) else Config()
    record_end(config, history, key, ended, progress)


def _is_lost(cluster: Cluster, firing: Firing, now: datetime) -> bool:
    """Return True if nobody works on a firing: its Workflow is over or, without one, its run gives no sign of life.

    A firing with a Workflow of another cluster is left alone.
    """
    if firing.workflow:
        return firing.cluster == name_cluster_place(cluster) and bool(is_over(cluster, firing.workflow))
    return not _is_at_work(firing, now)


def choose_link(config: Config, ended: FiringEnd) -> str:
    """Return the place where people see what has happened: the run in Kubeflow's UI, else its folder."""
    url = config.tracking.kubeflow_url.rstrip("/")
    return f"{url}/#/runs/details/{ended.job_id}" if url else ended.run_uri


def _digest_identity(config: Config, dataset_digest: str) -> str:
    """Return a digest of data, model and settings; initial weights count by their name in `train.from`.

    So `champion` stays the same when the champion changes: a new champion alone is nothing to train on, and neither is
    a release with another order of samples.
    """
    asked = config.model_copy(update={"train": config.train.without_weights()})
    same = {"order": ORDERS[0], "from": config.train.start_from}
    return storage.digest_json({**asked.training_identity(dataset_digest), **same})


def _classify_end(error: ErrorDocument | None, skipped: Skipped | None) -> tuple[Result, str]:
    if error is not None:
        canceled = error.failure_class in (FailureClass.TERMINATED, FailureClass.INTERRUPTED)
        return ("canceled" if canceled else "failed"), error.line
    return ("skipped", skipped.line) if skipped is not None else ("trained", "the run succeeded")


def _explain_pause(history: History, instant: datetime) -> str:
    """Return the reason why a schedule skips an instant: it is paused, or was resumed later; empty if it runs.

    Kubeflow and CronJobs start the run that they have missed last as soon as they are resumed.
    """
    event, due = history.read_last_event(), format_instant(instant)
    if event is not None and event.kind == "paused":
        return f"the schedule {history.name} is paused: {event.line}"
    if event is not None and instant.timestamp() < event.time:
        return f"this was due at {due}, before the schedule {history.name} was resumed"
    return ""


def _make_firing(instant: datetime, trigger: str, job_id: str, paths: RunPaths, created: datetime) -> Firing:
    workflow, cluster = launch.find_pipeline_place()
    return Firing(
        instant=format_instant(instant),
        trigger=trigger,
        job_id=job_id,
        run_uri=paths.uri,
        created=created.timestamp(),
        workflow=workflow,
        cluster=cluster,
    )


def _is_at_work(firing: Firing, now: datetime) -> bool:
    """Return True if a run is at work, by its Workflow or, where that is not known, by its last sign of life."""
    if firing.workflow:
        is_over = launch.is_pipeline_over(firing.workflow, firing.cluster)
        if is_over is not None:
            return not is_over
    beat = heartbeat.read_last_beat(RunPaths(firing.run_uri))
    return now.timestamp() - max(firing.created, beat) < SILENT_SECONDS


def _parse_moment(created: str) -> datetime:
    try:
        moment = datetime.fromisoformat(created.replace("Z", "+00:00"))
    except ValueError:
        moment = datetime.now(timezone.utc)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


def _make_skipped(config: Config, key: str, why: Why, line: str, progress: Progress) -> Begun:
    progress(f"nothing to do: {line}")
    return Begun(config, key, Skipped(why=why, line=line))


def _is_registered(paths: RunPaths) -> bool:
    """Return True if a scheduled run has come to its end, whatever was said of it."""
    return storage.exists(paths.registration) and storage.exists(_fired_uri(paths))


def _make_outcome(paths: RunPaths, skipped: Skipped) -> Outcome:
    section = reports.describe_idle_run(paths.uri, skipped.line)
    return Outcome(
        run_uri=paths.uri,
        summary={"result": f"nothing to do: {skipped.line}", "run_uri": paths.uri, "why": skipped.why},
        next_step="finish",
        html=reports.render_section(section, "run"),
        markdown=reports.render_markdown(section),
    )


def _fired_uri(paths: RunPaths) -> str:
    return storage.join(paths.uri, "firing.json")


def send_alert(line: str, link: str, over_http: bool, progress: Progress) -> bool:
    """Send `{"text": "<line> <link>"}`, as Slack, Mattermost and Google Chat take it; False where nothing was sent."""
    url = os.environ.get(ALERT_URL_ENV, "").strip()
    if not url:
        return False
    why = _explain_unusable_url(url, over_http) or _post_alert(
        url, json.dumps({"text": f"{line} {link}".strip()}).encode()
    )
    if why:
        progress(f"warning: no alert was sent: {why}")
    return not why


def _explain_unusable_url(url: str, over_http: bool) -> str:
    """Explain why the URL cannot be used; empty where it can. Never name it: whoever has it can write there."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in (("https", "http") if over_http else ("https",)) and parts.hostname:
            return ""
    return f"{ALERT_URL_ENV} is no https URL; http needs schedule.alert_over_http"


def _post_alert(url: str, content: bytes) -> str:
    """Post the content; return why that failed, or an empty text."""
    headers = {"Content-Type": "application/json", "User-Agent": "kftrain"}
    try:
        request = urllib.request.Request(url, content, headers)
        with urllib.request.build_opener(_NoRedirects()).open(request, timeout=ALERT_TIMEOUT_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"the webhook answered {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:  # their words may contain the URL
        return f"the webhook cannot be reached ({type(error).__name__})"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the URL is a secret, and what it points at is trusted no further."""

    def redirect_request(self, *arguments: Any) -> None:
        """Return None, so that urllib raises the redirect as an error."""
