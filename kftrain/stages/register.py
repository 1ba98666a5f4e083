"""The last stage: registers the model, lets the gate decide, writes the report of the run and closes its MLflow run."""

from __future__ import annotations

from dataclasses import replace

from kftrain import config as configuration
from kftrain import registry, report, tracking
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.data.shards.manifest import Manifest
from kftrain.errors import ConfigError, TrackingError
from kftrain.report import content, environment
from kftrain.run import documents
from kftrain.run.best_effort import best_effort
from kftrain.run.commit import differences
from kftrain.run.config import read_config
from kftrain.run.documents import Completion, Evaluation, Registration
from kftrain.run.paths import RunPaths
from kftrain.stages import failure, firing, reference_set, tracked, trained_on
from kftrain.stages.comparison import PAGE_VERSIONS, compare_versions
from kftrain.stages.dataset import read_dataset, read_shards
from kftrain.stages.drift import read_drift
from kftrain.stages.evaluate import read_complete, read_evaluation, read_performance
from kftrain.stages.outcome import Outcome, finite_metrics
from kftrain.stages.package import package_of
from kftrain.stages.task_metrics import task_metrics, with_goal
from kftrain.stages.train import read_history
from kftrain.tasks.overview import read_overview
from kftrain.trust import permit

REPORT_NAME, COMPARISON_NAME = "report.html", "comparison.html"


def register(run_uri: str, progress: Progress = to_log) -> Outcome:
    """Register the evaluated model of a run, and promote it if gate and policy say so. Raises KftrainError."""
    with failure.announced("register", progress):
        skipped = firing.skipped_outcome(RunPaths(run_uri), progress)
        if skipped is not None:
            return skipped
        config = read_config(RunPaths(run_uri))
    return _register("register", RunPaths(run_uri), config, progress)


def gate(run_uri: str, overrides: tuple[str, ...] = (), progress: Progress = to_log) -> Outcome:
    """Let the gate decide again on the registered model of a run, with other settings. Raises KftrainError."""
    paths = RunPaths(run_uri)
    with failure.announced("gate", progress):
        saved = with_goal(permit(read_config(RunPaths(run_uri))), is_kept=True)
        config = with_goal(configuration.parse_kept(saved.to_yaml(), paths.config, overrides))
        require_only_registry(saved, config)
        documents.read(Registration, paths.registration, TrackingError)
    return _register("gate", paths, config, progress)


def require_only_registry(saved: Config, config: Config) -> None:
    """Raise ConfigError for an override outside the gate's settings: the model stays as it was trained."""
    for key, _, new in differences(saved.to_dict(), config.to_dict()):
        if not key.startswith("registry.") or key == "registry.model_name":
            raise ConfigError("only the gate's settings can change here", where=key, value=new, fix="set registry.…")


def _register(stage: str, paths: RunPaths, config: Config, progress: Progress) -> Outcome:
    with failure.reported(stage, paths, config, progress):
        config = with_goal(config, is_kept=True)
        completion = read_complete(paths, config)
        evaluation = read_evaluation(paths, config, completion)
        shards, manifest = read_dataset(paths)
        mlflow_run_id = tracked.read(paths) or tracked.start(paths, config, shards, manifest)
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
        notes = (trained_on.gate_reason(config, shards, manifest), lacks)
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
            page = report.comparison_html(comparison, environment.facts())
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
    others = [content.uri("Beside other versions", paths.comparison)] if is_compared else []
    page = report.run_html(
        config,
        shards=manifest.to_dict(),
        overview=read_overview(read_shards(paths).manifest_uri),
        completion=completion,
        history=read_history(paths),
        evaluation=evaluation,
        registration=registration,
        performance=read_performance(paths, evaluation),
        drift=read_drift(paths),
        reference=reference_set.read_own(paths, completion),
        written=[*environment.facts(), *others],
    )
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
        markdown=report.registration_markdown(config, registration),
    )
