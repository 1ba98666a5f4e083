"""Compares versions of a registered model by what their runs left behind; writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kftrain import registry
from kftrain.config import Config
from kftrain.core.plugins import user_code
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards.manifest import Manifest
from kftrain.data.windows import is_stream
from kftrain.errors import KftrainError
from kftrain.registry import ComparedVersion
from kftrain.reports.versions import ReportedVersion, VersionComparison
from kftrain.run import attempts, documents
from kftrain.run.config import read_config
from kftrain.run.documents import Completion, RunShards
from kftrain.run.paths import RunPaths
from kftrain.run.timeline import compute_timeline
from kftrain.stages.train import read_history
from kftrain.tasks import build_task, build_task_of
from kftrain.tasks.registry import BUILT_IN as TASKS
from kftrain.tasks.run_dataset import read_dataset
from kftrain.tasks.user_metrics import task_metrics, with_goal
from kftrain.tracking.runs import flatten
from kftrain.trust import Trust

PAGE_VERSIONS = 6
"""Number of versions on a page if none are named: the champion and the newest."""


def compare_versions(config: Config, names: Sequence[str] = (), at_most: int = 0) -> VersionComparison:
    """Compare versions by number or alias (`v3`, `champion`), see `registry.compare`, and add what their runs left.

    A run that cannot be read is left out, and its version says so. Raises TrackingError, EvaluationError.
    """
    config, task = with_goal(config, is_kept=True), build_task(config.task)

    def slice_names(keys: list[str], sums: Mapping[str, np.ndarray]) -> list[str]:
        if config.data.components:
            return [key.partition("/")[0] for key in keys]
        with user_code("task.slice_names"):
            return task.slice_names(keys, sums)

    compared = registry.compare(config, names, task_metrics(config), slice_names, at_most)
    return VersionComparison(
        model_name=compared.model_name,
        metric=config.registry.metric,
        goal=config.registry.goal,
        confidence=config.registry.confidence,
        baseline=compared.baseline,
        evaluation_digest=compared.evaluation_digest,
        versions=[_describe_version(version, Trust.of(config)) for version in compared.versions],
    )


def _describe_version(version: ComparedVersion, trust: Trust) -> ReportedVersion:
    """Join a version with the documents of its run; a run that cannot be read becomes the version's `problem`."""
    reference, run, problem = version.reference, dict[str, Any](), version.problem
    if reference is not None:
        try:
            trust.require_place(reference.run_uri)
            run = _read_run(RunPaths(reference.run_uri), trust)
        except KftrainError as error:
            problem = "; ".join(part for part in (problem, f"its run cannot be read: {error.line}") if part)
    return ReportedVersion(
        version=version.version,
        aliases=version.aliases,
        run_uri=reference.run_uri if reference else "",
        problem=problem,
        evaluation=version.evaluation,
        differences=version.differences,
        slice_differences=version.slice_differences,
        **run,
    )


def _read_run(paths: RunPaths, trust: Trust) -> dict[str, Any]:
    """Read the fields of `ReportedVersion` that are in a run's folder. Raises KftrainError."""
    config = read_config(paths)
    shards, manifest = read_dataset(paths)
    completion, history = documents.read(Completion, paths.complete), read_history(paths)
    return {
        "completion": completion,
        "history": history,
        "timeline": compute_timeline(attempts.read_claims(paths), completion, history),
        "settings": flatten(config.to_dict()),
        "data": flatten(_describe_data(manifest)),
        "tokens_per_sample": _tokens_per_sample(config, shards, manifest, trust),
        "has_gpus": config.launch.gpus_per_node > 0,
    }


def _describe_data(manifest: Manifest) -> dict[str, Any]:
    return {name: value for name, value in manifests.describe(manifest).items() if name != "baselines"}


def _tokens_per_sample(config: Config, shards: RunShards, manifest: Manifest, trust: Trust) -> int:
    """Return the number of new tokens in a training sample (windows may overlap); 0 if the data is no token stream."""
    if not is_stream(manifest.sample_schema):
        return 0
    trust.require_kind("task", config.task.kind, TASKS)  # another run names it
    window = build_task_of(config.task, shards.manifest_uri, manifest.task_settings).window
    return window.stride if window is not None else 0
