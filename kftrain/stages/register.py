"""The last stage: registers the model, lets the gate decide, writes the report of the run and closes its MLflow run."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from kftrain import config as configuration
from kftrain import launch, registry, reports, tracking
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.core.progress import Progress, to_log
from kftrain.data.opened import OpenedDataset
from kftrain.data.schema import SPLITS
from kftrain.data.shards.manifest import Manifest, shard_uri
from kftrain.errors import ConfigError, DataError, KftrainError, TrackingError
from kftrain.evaluate import reference_set
from kftrain.registry.package import STORES, ModelPackage, list_requirements, make_own_wheel
from kftrain.reports import content
from kftrain.run import documents
from kftrain.run.best_effort import best_effort
from kftrain.run.commit import list_differences
from kftrain.run.config import read_config
from kftrain.run.documents import Completion, Evaluation, GateReason, Registration, RunShards
from kftrain.run.paths import RunPaths
from kftrain.sharding.dataset_drift import read_drift
from kftrain.sharding.parts.content import UNKNOWN
from kftrain.sharding.parts.records import read_table
from kftrain.stages import failure, firing
from kftrain.stages.comparison import PAGE_VERSIONS, compare_versions
from kftrain.stages.evaluate import read_complete, read_evaluation, read_performance
from kftrain.stages.outcome import Outcome, finite_metrics
from kftrain.stages.train import read_history
from kftrain.tasks import Task, build_task_of
from kftrain.tasks.overview import read_overview
from kftrain.tasks.run_dataset import read_dataset
from kftrain.tasks.user_metrics import task_metrics, with_goal
from kftrain.tracking import mlflow_run
from kftrain.tracking.runs import list_model_parameters
from kftrain.trust import Trust, permit, read_shards

REPORT_NAME, COMPARISON_NAME = "report.html", "comparison.html"


def register(run_uri: str, progress: Progress = to_log) -> Outcome:
    """Register the evaluated model of a run, and promote it if gate and policy say so. Raises KftrainError."""
    with failure.announce_failure("register", progress):
        skipped = firing.find_skipped_outcome(RunPaths(run_uri), progress)
        if skipped is not None:
            return skipped
        config = read_config(RunPaths(run_uri))
    return _register("register", RunPaths(run_uri), config, progress)


def gate(run_uri: str, overrides: tuple[str, ...] = (), progress: Progress = to_log) -> Outcome:
    """Let the gate decide again on the registered model of a run, with other settings. Raises KftrainError."""
    paths = RunPaths(run_uri)
    with failure.announce_failure("gate", progress):
        saved = with_goal(permit(read_config(RunPaths(run_uri))), is_kept=True)
        config = with_goal(configuration.parse_kept(saved.to_yaml(), paths.config, overrides))
        require_only_registry(saved, config)
        documents.read(Registration, paths.registration, TrackingError)
    return _register("gate", paths, config, progress)


def require_only_registry(saved: Config, config: Config) -> None:
    """Raise ConfigError for an override outside the gate's settings: the model stays as it was trained."""
    for key, _, new in list_differences(saved.to_dict(), config.to_dict()):
        if not key.startswith("registry.") or key == "registry.model_name":
            raise ConfigError("only the gate's settings can change here", where=key, value=new, fix="set registry.…")


def _register(stage: str, paths: RunPaths, config: Config, progress: Progress) -> Outcome:
    with failure.report_failure(stage, paths, config, progress):
        config = with_goal(config, is_kept=True)
        completion = read_complete(paths, config)
        evaluation = read_evaluation(paths, config, completion)
        shards, manifest = read_dataset(paths)
        mlflow_run_id = mlflow_run.read_mlflow_run_id(paths) or mlflow_run.start_mlflow_run(
            paths, config, shards, manifest, launch.build_pipeline_tags(config)
        )
        registered = registry.register(
            config,
            paths,
            completion,
            evaluation,
            mlflow_run_id,
            lambda: package_of(config, shards, manifest, completion, evaluation, progress),
        )
        metrics = task_metrics(config)
        lacks = reference_set.is_missing(paths, config, evaluation.evaluation_digest)
        notes = (count_seen_records(config, shards, manifest), lacks)
        registration = registry.gate_and_promote(config, paths, registered, completion, evaluation, metrics, *notes)
        comparison = _comparison(paths, config)
        page = _write_report(paths, config, manifest, completion, evaluation, registration, bool(comparison))
        for name, text in ((REPORT_NAME, page), (COMPARISON_NAME, comparison)):
            if text:
                tracking.log_text(config.tracking.uri, mlflow_run_id, text, name)
        tracking.finish_run(config.tracking.uri, mlflow_run_id, "FINISHED")
        outcome = replace(_make_outcome(paths, config, registration, page, progress), comparison=comparison)
        registry.remove_dead_writers(config, progress)  # last: it may take a while
        return outcome


def _comparison(paths: RunPaths, config: Config) -> str:
    """Write the page of the champion and the newest versions and return it; empty for a single version, or an error."""
    page = ""
    with best_effort("there is no comparison page"):
        comparison = compare_versions(config, at_most=PAGE_VERSIONS)
        if len(comparison.versions) > 1:
            page = reports.render_page(reports.compose_comparison_page(comparison, reports.describe_environment()))
            storage.publish(paths.comparison, page)
    return page


def _write_report(
    paths: RunPaths,
    config: Config,
    manifest: Manifest,
    completion: Completion,
    evaluation: Evaluation,
    registration: Registration,
    is_compared: bool,
) -> str:
    """Write the page of the whole run into its folder and return it."""
    others = [content.make_uri_fact("Beside other versions", paths.comparison)] if is_compared else []
    sections = reports.compose_run_page(
        config,
        manifest=manifest.to_dict(),
        overview=read_overview(read_shards(paths).manifest_uri),
        completion=completion,
        history=read_history(paths),
        evaluation=evaluation,
        registration=registration,
        performance=read_performance(paths, evaluation),
        drift=read_drift(paths),
        reference=reference_set.read_own_evaluation(paths, completion),
        written=[*reports.describe_environment(), *others],
    )
    page = reports.render_page(sections)
    storage.publish(paths.report, page)
    return page


def _make_outcome(
    paths: RunPaths, config: Config, registration: Registration, page: str, progress: Progress
) -> Outcome:
    role = "is champion" if registration.promoted else "is not champion"
    what = "no new version" if registration.identical else f"version {registration.version} {role}"
    result = f"{registration.model_name} {what}: {registration.reason}"
    progress(result)
    challenger, champion, improvement = registration.challenger, registration.champion, registration.improvement
    return Outcome(
        run_uri=paths.uri,
        summary={"result": result, "run_uri": paths.uri, "report_uri": paths.report, **registration.to_dict()},
        metrics=finite_metrics(
            {
                registration.metric: challenger.value,
                f"champion_{registration.metric}": champion.value if champion else None,
                "improvement": improvement.value if improvement else None,
                "promoted": registration.promoted,
                "version": registration.version,
            }
        ),
        html=page,
        markdown=reports.render_markdown(reports.describe_registration(config, registration)),
    )


Made = TypeVar("Made")


def package_of(
    config: Config,
    shards: RunShards,
    manifest: Manifest,
    completion: Completion,
    evaluation: Evaluation,
    progress: Progress,
) -> ModelPackage:
    """Make the package of a run's model. Registering needs none of its parts, so none of them fails a run."""

    def make_or_warn(what: str, make: Callable[[], Made], otherwise: Made) -> Made:
        try:
            return make()
        except KftrainError as error:
            progress(f"warning: the registered version has no {what}: {error.line}")
            return otherwise

    no_example: tuple[Mapping[str, Any], Mapping[str, str]] = ({}, {})
    example, types = make_or_warn("input example", lambda: _make_example(config, shards, manifest), no_example)
    card = make_or_warn(
        "card", lambda: reports.render_model_card(config, manifest.to_dict(), completion, evaluation), ""
    )
    return ModelPackage(
        card=card,
        params=list_model_parameters(config),
        requirements=list_requirements(completion.packages, _list_installed(), completion.export_uri),
        wheel=make_or_warn("wheel of kftrain", make_own_wheel, None),
        input_example=example,
        answer_types=types,
    )


def _make_example(config: Config, shards: RunShards, manifest: Manifest) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return a row for `predict`, made of the first validation sample, and the types of the columns of its answer."""
    task: Task = build_task_of(config.task, shards.manifest_uri, manifest.task_settings)
    dataset = OpenedDataset(shards.manifest_uri, manifest, "validation")
    if not len(dataset):
        return {}, {}
    with user_code("task.input_example"):
        example = task.input_example(dataset[0])
        return (example, task.answer_types()) if example else ({}, {})


def _list_installed() -> dict[str, str]:
    """Return the installed distributions among those that a server may need, name -> version."""
    versions = {}
    for name in ("mlflow", *(name for names in STORES.values() for name in names)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def count_seen_records(config: Config, shards: RunShards, manifest: Manifest) -> GateReason | None:
    """Count the validation records of a dataset that the champion, or weights that it began with, were trained on.

    Reads the 24 bytes that parts remember of each record. The count decides nothing: a challenger that is better
    although the champion has seen the data is better. None without a champion. Raises KftrainError if storage or MLflow
    is away.
    """
    champion = registry.champion(config)
    if champion is None:
        return None
    subject, export_uri, trained = f"the champion, version {champion.version}, was trained on", champion.export_uri, []
    try:
        while export_uri:
            paths = RunPaths(export_uri.rpartition("/export/")[0])
            Trust.of(config).require_place(paths.uri)
            trained.append(_read_hashes(*read_dataset(paths), "train"))
            export_uri = read_config(paths).train.initial_weights.export_uri
        held_out = _read_hashes(shards, manifest, "validation")
    except KftrainError as error:
        if error.retryable:
            raise
        text = f"how many of the validation records {subject} is not known: {error.what}"
        return GateReason(code="trained_on_unknown", verdict="for", text=text)
    count, total = int(np.isin(held_out, np.concatenate(trained)).sum()), len(held_out)
    text = f"{subject} {count:,} of {total:,} validation records"
    return GateReason(code="trained_on", verdict="for", text=text, figures={"value": count, "total": total})


def _read_hashes(shards: RunShards, manifest: Manifest, split: str) -> np.ndarray:
    """Read the hashes of a split's records, `[records]`. Raises DataError if its shards remember none."""
    listed = [shard for content in manifest.splits.values() for shard in content.shards]
    if not all(shard.folder.startswith("../parts/") for shard in listed):
        raise DataError("adopted shards remember no records", where=shards.manifest_uri)
    folders = {shard_uri(shards.manifest_uri, shard).rpartition("/")[0] for shard in listed}
    tables = np.concatenate([read_table(folder) for folder in folders])
    hashes: np.ndarray = tables[(tables[:, 2] == SPLITS.index(split)) & (tables[:, 1] != UNKNOWN), 1]
    return hashes
