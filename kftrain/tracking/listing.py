"""Lists the runs that a tracking server knows, whichever storage root they lie in; writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kftrain.errors import TrackingError
from kftrain.tracking import client, endpoint, model_client
from kftrain.tracking.base import metric_name
from kftrain.tracking.runs import EVALUATION_PREFIX, RUN_ID_TAG, check

CHAMPION_ALIAS = "champion"
ERROR_TAG = "kftrain.error"


@dataclass(frozen=True)
class ListedRun:
    """A training as MLflow shows it."""

    run_id: str
    storage_root: str
    status: str
    """Status in MLflow's words: `RUNNING`, `FINISHED`, `FAILED` or `KILLED`."""
    step: int
    """The last step whose loss was recorded; 0: none."""
    num_steps: int
    metric: str
    """Name of the metric that the gate compares; empty if the run was not evaluated yet."""
    value: float | None
    model_name: str
    version: int | None
    is_champion: bool
    """True if the model's alias `champion` points to the run's highest version."""
    error: str
    start_time_ms: int
    schedule: str


def list_runs(uri: str) -> list[ListedRun]:
    """List every training of every experiment, sorted by its id. Raises TrackingError."""
    path = endpoint.sqlite_path(uri)
    if path is not None and not path.exists():  # MLflow would make one
        raise TrackingError(
            "there is no such database", where="tracking.uri", value=str(path), fix="check tracking.uri"
        )
    check(uri)
    runs = {key: run for key, run in client.tagged_runs(uri, RUN_ID_TAG).items() if "," not in run.tags[RUN_ID_TAG]}
    models = {key: run.params.get("registry.model_name") or run.params.get("run.name", "") for key, run in runs.items()}
    versions = _find_versions(uri, sorted(set(models.values())))
    overviews = [
        _describe_run(run, models[key], *versions.get((models[key], key), (None, False))) for key, run in runs.items()
    ]
    return sorted(overviews, key=lambda run: run.run_id)


def _find_versions(uri: str, names: Sequence[str]) -> dict[tuple[str, str], tuple[int, bool]]:
    """Return (model, MLflow id of a run) -> the run's highest version, and True if that is champion."""
    highest = {}
    for name in filter(None, names):
        champion = model_client.get_aliases(uri, name).get(CHAMPION_ALIAS)
        for version in model_client.search_versions(uri, name):  # lowest number first: the highest one stays
            highest[name, version.run_id] = version.version, version.version == champion
    return highest


def _describe_run(run: client.RunRecord, model_name: str, version: int | None, is_champion: bool) -> ListedRun:
    metric, steps = run.params.get("registry.metric", ""), run.params.get("train.steps", "")
    point = run.latest.get(metric_name(EVALUATION_PREFIX + metric))
    return ListedRun(
        run_id=run.tags[RUN_ID_TAG],
        storage_root=run.params.get("run.storage_root", ""),
        status=run.status,
        step=run.latest["loss"].step if "loss" in run.latest else 0,
        num_steps=int(steps) if steps.isdecimal() else 0,
        metric=metric if point else "",
        value=point.value if point else None,
        model_name=model_name,
        version=version,
        is_champion=is_champion,
        error=run.tags.get(ERROR_TAG, "") if run.status in ("FAILED", "KILLED") else "",
        start_time_ms=run.start_time_ms,
        schedule=run.params.get("schedule.name", ""),
    )
