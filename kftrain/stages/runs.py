"""Lists the runs below a storage root by their documents, or those that MLflow knows; writes nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import KftrainError, TrackingError
from kftrain.registry.champion_alias import CHAMPION
from kftrain.registry.journal import Journal, find_champion_version
from kftrain.run import attempts, commit, documents
from kftrain.run.attempts import Claim
from kftrain.run.config import is_opened, read_config
from kftrain.run.documents import Completion, Registration
from kftrain.run.error import read_error
from kftrain.run.paths import RunPaths
from kftrain.schedule.settings import format_time
from kftrain.stages import firing, resolve
from kftrain.tracking import client, endpoint, model_client
from kftrain.tracking.base import clean_metric_name
from kftrain.tracking.runs import EVALUATION_PREFIX, RUN_ID_TAG, check

UNREADABLE = "unreadable"


@dataclass(frozen=True)
class RunOverview:
    """The state of a run in one row, for `kftrain runs`."""

    run_id: str
    uri: str
    state: str
    """`registered`, `trained`, `running`, `stopped`, `failed`, `skipped`, `unfinished`, or `unreadable`."""
    step: int = 0
    """Step of the newest committed checkpoint; of runs that MLflow lists, the last recorded step."""
    num_steps: int = 0
    metric: str = ""
    """Name of the metric that the gate compares."""
    value: float | None = None
    model_name: str = ""
    version: int | None = None
    is_champion: bool = False
    """True if its version is champion by the journal of promotions; of runs that MLflow lists, by the alias."""
    reason: str = ""
    """The reason why it failed, stopped or cannot be read."""
    chosen: str = ""
    """The reason why its model is that of an earlier step than the last one."""
    started: str = ""
    """Time at which it was first opened, or began to train, in RFC 3339; empty: not known."""
    schedule: str = ""
    """Name of the schedule that it is a run of; empty: none."""


def list_runs(storage_root: str) -> Iterator[RunOverview]:
    """Yield every run below a storage root that was opened, by name."""
    for name in storage.list_names(storage.join(storage_root, "runs")):
        paths = RunPaths.of(storage_root, name)
        if is_opened(paths):
            yield read_run_overview(paths)


def list_runs_of_mlflow(tracking_uri: str) -> list[RunOverview]:
    """List every run that MLflow knows, whichever storage root it lies in, by name. Raises TrackingError."""
    path = endpoint.sqlite_path(tracking_uri)
    if path is not None and not path.exists():  # MLflow would make one
        raise TrackingError(
            "there is no such database", where="tracking.uri", value=str(path), fix="check tracking.uri"
        )
    check(tracking_uri)
    records = client.find_tagged_runs(tracking_uri, RUN_ID_TAG)
    runs = {key: run for key, run in records.items() if "," not in run.tags[RUN_ID_TAG]}  # others were put aside
    models = {key: run.params.get("registry.model_name") or run.params.get("run.name", "") for key, run in runs.items()}
    versions = _find_versions(tracking_uri, sorted(set(models.values())))
    overviews = [
        _convert_record(run, models[key], *versions.get((models[key], key), (None, False))) for key, run in runs.items()
    ]
    return sorted(overviews, key=lambda run: run.run_id)


def _find_versions(uri: str, names: Sequence[str]) -> dict[tuple[str, str], tuple[int, bool]]:
    """Return (model, MLflow id of a run) -> the run's highest version, and True if that is champion."""
    highest = {}
    for name in filter(None, names):
        champion = model_client.get_aliases(uri, name).get(CHAMPION)
        for version in model_client.search_versions(uri, name):  # lowest number first: the highest one stays
            highest[name, version.run_id] = version.version, version.version == champion
    return highest


def _convert_record(run: client.RunRecord, model_name: str, version: int | None, is_champion: bool) -> RunOverview:
    states = {"RUNNING": "running", "FINISHED": "trained", "FAILED": "failed", "KILLED": "stopped"}
    is_registered = version is not None and run.status == "FINISHED"
    run_id, root = run.tags[RUN_ID_TAG], run.params.get("run.storage_root", "")
    metric, steps = run.params.get("registry.metric", ""), run.params.get("train.steps", "")
    point = run.latest.get(clean_metric_name(EVALUATION_PREFIX + metric))
    return RunOverview(
        run_id=run_id,
        uri=RunPaths.of(root, run_id).uri if root else "",
        state="registered" if is_registered else states.get(run.status, run.status.lower()),
        step=run.latest["loss"].step if "loss" in run.latest else 0,
        num_steps=int(steps) if steps.isdecimal() else 0,
        metric=metric if point else "",
        value=point.value if point else None,
        model_name=model_name if version is not None else "",
        version=version,
        is_champion=is_champion,
        reason=run.tags.get("kftrain.error", "") if run.status in ("FAILED", "KILLED") else "",
        started=format_time(run.start_time_ms / 1000),
        schedule=run.params.get("schedule.name", ""),
    )


def read_run_overview(paths: RunPaths) -> RunOverview:
    """Read the overview of a run; damaged documents give one in the state `unreadable`, with the reason."""
    try:
        return _read_documents(paths, read_config(paths))
    except KftrainError as error:
        return RunOverview(paths.run_id, paths.uri, UNREADABLE, reason=error.line)


def _read_documents(paths: RunPaths, config: Config) -> RunOverview:
    registration = documents.read_if_exists(Registration, paths.registration)
    state, reason = _read_state(paths, registration)
    completion = documents.read_if_exists(Completion, paths.complete)
    return RunOverview(
        run_id=paths.run_id,
        uri=paths.uri,
        state=state,
        step=completion.step if completion else commit.find_last_step(paths),
        num_steps=config.train.steps,
        metric=registration.metric if registration else "",
        value=registration.challenger.value if registration else None,
        model_name=registration.model_name if registration else "",
        version=registration.version if registration else None,
        is_champion=registration is not None and _is_champion(paths, registration),
        reason=reason,
        chosen=completion.explain_choice(config.train.steps) if completion else "",
        started=format_time(_read_start(paths)),
        schedule=config.schedule.name,
    )


def _read_start(paths: RunPaths) -> float:
    first = documents.read_if_exists(Claim, paths.attempt(1))
    return min([*resolve.read_openings(paths), *([first.start_time] if first else [])], default=0.0)


def _read_state(paths: RunPaths, registration: Registration | None) -> tuple[str, str]:
    """Return the state of a run, and the reason for it."""
    # The error first: every stage removes an older one, so it is of what was tried last, even beside a success.
    error = read_error(paths.error)
    if error is not None:
        stopped = error.exit_code in (130, 143)
        return "stopped" if stopped else "failed", error.line
    if _is_at_work(paths):
        return "running", ""
    skipped = firing.read_skipped(paths)
    if skipped is not None:
        return "skipped", skipped.line
    if registration is not None:
        return "registered", ""
    return ("trained" if storage.exists(paths.complete) else "unfinished"), ""


def _is_at_work(paths: RunPaths) -> bool:
    """Return True if the process that claimed the run last is alive; False on any other machine, which cannot tell."""
    number = attempts.find_last_attempt(paths)
    claim = documents.read_if_exists(Claim, paths.attempt(number)) if number else None
    if claim is None or claim.host != socket.gethostname():
        return False
    try:
        os.kill(claim.process_id, 0)  # signal 0 only asks whether the process is there
    except ProcessLookupError:
        return False
    except PermissionError:  # it is somebody else's, and alive
        return True
    return True


def _is_champion(paths: RunPaths, registration: Registration) -> bool:
    with contextlib.suppress(TrackingError):  # an entry is missing or damaged: kftrain models audit says so
        entries = Journal.of(paths.storage_root, registration.model_name).entries()
        return find_champion_version(entries) == registration.version
    return False
