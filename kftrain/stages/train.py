"""The second stage: trains until COMPLETE.json proves it; a run that is complete costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kftrain import launch, reports
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress, to_log
from kftrain.errors import DataError, OtherJobError, OtherTrainingError
from kftrain.launch.kubernetes import task_pods
from kftrain.launch.kubernetes.task_pods import TaskPodSettings
from kftrain.run.best_effort import best_effort
from kftrain.run.completion import find_completion
from kftrain.run.config import read_config, restore_config
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths
from kftrain.sharding.unchanged import forget_if_damaged
from kftrain.stages import failure, firing
from kftrain.stages.outcome import Outcome, finite_metrics
from kftrain.tasks.run_dataset import read_dataset, require_usable
from kftrain.tracking import mlflow_run


def train(run_uri: str, progress: Progress = to_log, task_config: TaskPodSettings | None = None) -> Outcome:
    """Train the run at `run_uri` to its end, from its last checkpoint if it has one. Raises KftrainError."""
    paths = RunPaths(run_uri)
    with failure.announce_failure("train", progress):
        nothing_to_do = firing.find_skipped_outcome(paths, progress)
        if nothing_to_do is not None:
            return nothing_to_do
        kept = read_config(paths)
        config = task_pods.apply_task_pods(kept, paths, task_config)
        with _restored_if_refused(paths, kept, progress):  # what is complete stays as it is, too
            completion = find_completion(paths, config)
    with failure.report_failure("train", paths, config, progress):
        shards, manifest = read_dataset(paths)
        skipped = completion is not None
        if completion is None:
            require_usable(shards, manifest, config)
            with (
                _restored_if_refused(paths, kept, progress),
                mlflow_run.restore_status_if_refused(paths, config, progress),
                forget_if_damaged(shards.manifest_uri, manifest),
            ):
                completion = launch.run_training(
                    paths,
                    config,
                    lambda: mlflow_run.start_mlflow_run(
                        paths, config, shards, manifest, launch.build_pipeline_tags(config), progress
                    ),
                )
        mlflow_run.log_missing_curve(paths, config, read_history(paths), progress)
        return _make_outcome(paths, config, completion, skipped, progress)


@contextlib.contextmanager
def _restored_if_refused(paths: RunPaths, kept: Config, progress: Progress) -> Iterator[None]:
    """Put the run's configuration back if the block finds that it is another training, or that another job holds it.

    The configuration was changed when the run was opened, before it could be seen that its job had committed a
    checkpoint.
    """
    try:
        yield
    except (OtherTrainingError, OtherJobError):
        with best_effort("the configuration of before could not be put back"):
            if restore_config(paths, kept):
                progress("the run has its configuration of before again")
        raise


def read_history(paths: RunPaths) -> list[dict[str, Any]]:
    """Read the recorded points of the training curve; empty before the first checkpoint. Raises DataError."""
    points = storage.read_json_if_exists(paths.history) or []
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise DataError("history.json is damaged", where=paths.history, fix="restore or delete it")
    return points


def _make_outcome(
    paths: RunPaths, config: Config, completion: Completion, skipped: bool, progress: Progress
) -> Outcome:
    loss = completion.metrics.get("loss")
    reached = "" if loss is None else f", loss {loss:.4g}"
    how = "was already trained" if skipped else "trained"
    chosen = completion.explain_choice(config.train.steps)
    because = f"; {chosen}" if chosen else ""
    result = f"{how}: {completion.num_trained} steps, {completion.num_parameters:,} parameters{reached}{because}"
    progress(result)
    section = reports.describe_training(config, completion, read_history(paths))
    return Outcome(
        run_uri=paths.uri,
        summary={"result": result, "run_uri": paths.uri, **completion.to_dict()},
        metrics=finite_metrics(
            {
                **completion.metrics,
                "steps": completion.num_trained,
                "num_parameters": completion.num_parameters,
                "seconds": completion.seconds,
            }
        ),
        html=reports.render_section(section, config.run.name, config.to_yaml()),
        markdown=reports.render_markdown(section),
    )
