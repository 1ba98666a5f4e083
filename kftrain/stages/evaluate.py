"""The third stage: measures the trained model, and the champion where it has no figures under the same digest."""

from __future__ import annotations

from kftrain import launch, registry, reports, tracking
from kftrain.checkpoint.export import read_recipe
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.errors import CheckpointError, ConfigError, EvaluationError, LaunchError
from kftrain.evaluate import reference_set
from kftrain.evaluate.identity import evaluation_digest
from kftrain.launch.kubernetes import task_pods
from kftrain.launch.kubernetes.task_pods import TaskPodSettings
from kftrain.registry import Champion
from kftrain.registry.comparison import find_performance
from kftrain.run import documents
from kftrain.run.completion import build_metrics_uri
from kftrain.run.config import read_config
from kftrain.run.documents import Completion, Evaluation, EvaluationTarget, Performance, Unmeasured
from kftrain.run.paths import RunPaths
from kftrain.stages import failure, firing
from kftrain.stages.outcome import Outcome, finite_metrics
from kftrain.tasks import build_task
from kftrain.tasks.run_dataset import read_dataset, require_usable
from kftrain.tasks.user_metrics import with_goal
from kftrain.tracking import mlflow_run
from kftrain.trust import Trust


def evaluate(run_uri: str, progress: Progress = to_log, task_config: TaskPodSettings | None = None) -> Outcome:
    """Evaluate the run at `run_uri`, which must be complete, and the champion on the same data. Raises KftrainError."""
    paths = RunPaths(run_uri)
    with failure.announce_failure("evaluate", progress):
        skipped = firing.find_skipped_outcome(paths, progress)
        if skipped is not None:
            return skipped
        config = task_pods.apply_task_pods(read_config(RunPaths(run_uri)), paths, task_config)
    with failure.report_failure("evaluate", paths, config, progress):
        config = with_goal(config, is_kept=True)
        completion = read_complete(paths, config)
        digest = evaluation_digest(config, completion.dataset_digest)
        own, champion = _make_target(completion, paths, digest), list[Champion]()
        reference = reference_set.write_reference_set(paths, config, digest)

        def list_others() -> list[EvaluationTarget]:
            champion.extend(_find_rivals(config, completion))
            rivals = [
                _make_target(rival, RunPaths(rival.run_uri), digest)
                for rival in champion
                if _is_measurable(paths, config, rival, digest)
            ]
            if not all(storage.exists(build_metrics_uri(target)) for target in (own, *rivals)):
                require_usable(*read_dataset(paths), config)  # before a job is started for data that is gone
            return [*rivals, *reference_set.make_targets(config, reference, [own, *rivals])]

        storage.remove(paths.unmeasured)
        evaluation = launch.run_evaluation(paths, config, digest, own, list_others)[0]
        if champion and storage.exists(paths.unmeasured):
            reason = documents.read(Unmeasured, paths.unmeasured, EvaluationError).reason
            progress(f"the champion, version {champion[0].version}, is not scored: {reason}")
        on_reference = reference_set.read_own_evaluation(paths, completion)
        _log_metrics(paths, config, {**_list_values(evaluation), **_list_values(on_reference, "reference_")})
        return _make_outcome(paths, config, evaluation, on_reference, progress)


def read_complete(paths: RunPaths, config: Config) -> Completion:
    """Read the completion of a run. Raises LaunchError if it is not complete, ConfigError if its export lies elsewhere.

    The export must lie in a place that the configuration trusts.
    """
    completion = documents.read(Completion, paths.complete, LaunchError)
    Trust.of(config).require_place(completion.export_uri)
    return completion


def read_evaluation(paths: RunPaths, config: Config, completion: Completion) -> Evaluation:
    """Read the evaluation of a run's own export. Raises EvaluationError if there is none yet."""
    digest = evaluation_digest(config, completion.dataset_digest)
    uri = storage.join(paths.evaluation(completion.checkpoint_digest, digest), "metrics.json")
    return documents.read(Evaluation, uri, EvaluationError)


def read_performance(paths: RunPaths, evaluation: Evaluation) -> Performance | None:
    """Read the measured performance of an evaluation's export; None if it was not measured. Raises EvaluationError."""
    folder = paths.evaluation(evaluation.checkpoint_digest, evaluation.evaluation_digest)
    return find_performance(folder, evaluation.export_digest)


def _make_target(model: Completion | Champion, paths: RunPaths, digest: str) -> EvaluationTarget:
    """Return a model as a target. Its figures go to its own run's folder, where the next challenger finds them."""
    return EvaluationTarget(
        export_uri=model.export_uri,
        export_digest=model.export_digest,
        checkpoint_digest=model.checkpoint_digest,
        output_uri=paths.evaluation(model.checkpoint_digest, digest),
        required=isinstance(model, Completion),
    )


def _find_rivals(config: Config, completion: Completion) -> list[Champion]:
    """Return the champion, or an empty list if there is none, or if it is the very model to evaluate."""
    champion = registry.champion(config)
    return [] if champion is None or champion.checkpoint_digest == completion.checkpoint_digest else [champion]


def _is_measurable(paths: RunPaths, config: Config, champion: Champion, digest: str) -> bool:
    """Return True if the champion can be scored on this data; else write the reason into the run's folder."""
    reason = _find_obstacle(config, champion, digest)
    if reason:
        document = Unmeasured(evaluation_digest=digest, export_digest=champion.export_digest, reason=reason)
        storage.publish_json(paths.unmeasured, document.to_dict())
    return not reason


def _find_obstacle(config: Config, champion: Champion, digest: str) -> str:
    """Return the reason why the champion cannot be scored on this data; empty if it can."""
    trust = Trust.of(config)
    try:
        trust.require_place(_make_target(champion, RunPaths(champion.run_uri), digest).output_uri)
        task = read_recipe(champion.export_uri, champion.export_digest, trust).task
    except (ConfigError, CheckpointError) as error:
        return error.line
    theirs, ours = (section.model_dump(mode="json") for section in (task, config.task))
    read_alike = build_task(config.task).reading_options if task.kind == config.task.kind else frozenset()
    is_same = all(theirs.get(name) == ours.get(name) for name in {*theirs, *ours} - read_alike)
    return "" if is_same else "it was trained for another task"


def _log_metrics(paths: RunPaths, config: Config, values: dict[str, float]) -> None:
    """Record values in the MLflow run of the training, if it has one."""
    mlflow_run_id = mlflow_run.read_mlflow_run_id(paths)
    if mlflow_run_id:
        tracking.log_evaluation(config.tracking.uri, mlflow_run_id, values)


def _list_values(evaluation: Evaluation | None, prefix: str = "") -> dict[str, float]:
    """Return the finite metrics and figures of an evaluation by name; empty without an evaluation."""
    if evaluation is None:
        return {}
    metrics = {name: interval.value for name, interval in evaluation.metrics.items()}
    return finite_metrics({f"{prefix}{name}": value for name, value in {**evaluation.figures, **metrics}.items()})


def _make_outcome(
    paths: RunPaths, config: Config, evaluation: Evaluation, reference: Evaluation | None, progress: Progress
) -> Outcome:
    values = _list_values(evaluation)
    metrics = ", ".join(f"{name} {values[name]:.4g}" for name in evaluation.metrics if name in values)
    result = f"evaluated on {evaluation.num_samples:,} samples: {metrics}"
    progress(result)
    if reference is not None:
        metrics = ", ".join(f"{name} {interval.value:.4g}" for name, interval in reference.metrics.items())
        progress(f"on the {reference.num_samples:,} samples of the reference set: {metrics}")
    section = reports.describe_evaluation(config, evaluation, read_performance(paths, evaluation), reference)
    return Outcome(
        run_uri=paths.uri,
        summary={"result": result, "run_uri": paths.uri, **evaluation.to_dict()},
        metrics={**values, **_list_values(reference, "reference_")},
        html=reports.render_section(section, config.run.name),
        markdown=reports.render_markdown(section),
        confusion=evaluation.confusion,
    )
