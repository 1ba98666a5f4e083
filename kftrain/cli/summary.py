"""The end of `kftrain run` in words, from the documents that the stages left in the run's folder."""

from __future__ import annotations

from kftrain.client.completed_run import CompletedRun
from kftrain.config import Config
from kftrain.data.shards.manifest import describe_counts
from kftrain.reports import wording
from kftrain.run import advice
from kftrain.run.advice import Situation
from kftrain.run.documents import Completion, Interval, Registration
from kftrain.run.error import ErrorDocument
from kftrain.run.paths import RunPaths
from kftrain.stages.firing import read_skipped
from kftrain.tasks.run_dataset import read_dataset

LABEL_WIDTH = 12


def success_lines(run_uri: str) -> list[str]:
    """Write what was trained, how good it is, and where it is now."""
    paths = RunPaths(run_uri)
    skipped = read_skipped(paths)
    if skipped is not None:
        return [f"run {paths.run_id} had nothing to do: {skipped.line}"]
    run = CompletedRun.read(run_uri)
    _, manifest = read_dataset(paths)
    data = f"{manifest.source}: {describe_counts(manifest)} (dataset {wording.shorten_digest(manifest.dataset_digest)})"
    baselines, chosen = run.evaluation.baselines, run.completion.explain_choice(run.config.train.steps)
    metrics = [_describe_metric(name, value, baselines.get(name, {})) for name, value in run.evaluation.metrics.items()]
    return [
        f"run {paths.run_id} is complete",
        *_label_lines("data", [data]),
        *_label_lines("model", [_describe_model(run.completion), *([chosen] if chosen else [])]),
        *_label_lines("metrics", metrics),
        *_label_lines("registered", _describe_registration(run.registration)),
        *_label_lines("report", [paths.report]),
        *_label_lines("MLflow", [mlflow_command(run.config)]),
        *_label_lines("load it", [load_command(run.config, run.registration)]),
    ]


def failure_lines(error: ErrorDocument, situation: Situation) -> list[str]:
    """Write what to do after a failure; the error itself, with its own fix, is the program's last line."""
    chosen = advice.advise(error, situation, with_fix=False)
    lines = [f"{error.stage or 'the pipeline'} failed"]
    for label, value in (("run", situation.run_uri), ("log", situation.log)):
        lines += _label_lines(label, [value] if value else [])
    return lines + _label_lines("next", [text for text in (chosen.text, chosen.command) if text])


def mlflow_command(config: Config) -> str:
    """Write how to look at the run in MLflow: a command for a database, the address of a server."""
    uri = config.tracking.uri
    return uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"


def load_command(config: Config, registration: Registration) -> str:
    """Write a shell command that loads the registered model."""
    model = f"models:/{registration.model_name}/{registration.version}"
    code = (
        f"import mlflow; mlflow.set_tracking_uri('{config.tracking.uri}'); model = mlflow.pyfunc.load_model('{model}')"
    )
    return f'python -ic "{code}"'


def _label_lines(label: str, values: list[str]) -> list[str]:
    return [f"  {label if i == 0 else '':{LABEL_WIDTH}}{value}" for i, value in enumerate(values)]


def _describe_model(completion: Completion) -> str:
    parts = [
        f"{wording.format_count(completion.num_parameters)} parameters",
        wording.format_plural(completion.step, "step"),
        f"world size {completion.world_size}",
    ]
    if "loss" in completion.metrics:
        parts.append(f"loss {wording.format_number(completion.metrics['loss'])}")
    if "samples_per_second" in completion.metrics:
        parts.append(f"{wording.format_number(completion.metrics['samples_per_second'], 3)} samples/s")
    return ", ".join(parts)


def _describe_metric(name: str, interval: Interval, baselines: dict[str, float]) -> str:
    beside = ", ".join(f"{baseline} {wording.format_number(value)}" for baseline, value in baselines.items())
    return f"{name} {describe_interval(interval)}" + (f"; baselines: {beside}" if beside else "")


def describe_interval(interval: Interval, signed: bool = False) -> str:
    """Write an interval with as many digits as it has: `2.314 (2.290 to 2.338)`."""
    value, edges = wording.format_interval(interval.value, interval.low, interval.high, signed)
    return f"{value} ({edges})"


def _describe_registration(registration: Registration) -> list[str]:
    role = "champion" if registration.promoted else "not champion"
    lines = [f"{registration.model_name} version {registration.version}, {role}: {registration.reason}"]
    if registration.champion is not None:
        before = f"version {registration.champion_version} was champion"
        lines.append(f"{before}: {registration.metric} {describe_interval(registration.champion)}")
    if registration.improvement is not None:
        lines.append(f"improvement {describe_interval(registration.improvement, signed=True)}")
    if registration.awaits_person:
        lines.append(f"a person decides: kftrain models promote {registration.version} --reason …")
    return lines
