"""`train.from`: which weights a run starts with, looked up once, when it is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kftrain import registry, storage
from kftrain.checkpoint.export import read_recipe
from kftrain.config import Config
from kftrain.errors import CheckpointError, ConfigError
from kftrain.models.settings import ModelConfig
from kftrain.models.signature import options_of
from kftrain.progress import Progress
from kftrain.registry import lineage
from kftrain.run import documents, export
from kftrain.run.config import is_opened, read_config
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths
from kftrain.tasks import Task
from kftrain.tracking import model_client
from kftrain.trust import Trust

if TYPE_CHECKING:
    from kftrain.train.settings import TrainConfig


def with_initial_weights(config: Config, paths: RunPaths, progress: Progress) -> Config:
    """The configuration with what `train.from` comes to: what the run has kept, or what is found now.

    A champion that there is not yet is no error: the training starts from scratch, and says so. Raises ConfigError for
    a version that there is not, CheckpointError for an export that is gone, TrackingError.
    """
    train = config.train
    if train.from_scratch:
        return _starting_with(config, train.without_weights())
    kept = read_config(paths).train.initial_weights if is_opened(paths) else None
    for known in filter(None, (train.initial_weights, kept)):
        if known.asked == train.start_from:
            return _starting_with(config, train.model_copy(update={"initial_weights": known}))
    found = _found(config)
    progress(f"train.from {train.start_from}: {found.initial_weights.origin}")
    return _starting_with(config, found)


def require_fit(config: Config, task: Task) -> None:
    """Raises ConfigError where the weights were trained as another model, or read other files than the task does.

    Shapes are compared when they are loaded. A tokenizer of another dataset would fit, and each token mean another; so
    would a model of as many heads as never trained together.
    """
    start, trust = config.train.initial_weights, Trust.of(config)
    if not start.export_uri:
        return
    recipe = read_recipe(start.export_uri, start.export_digest, trust)
    if recipe.model.kind != config.model.kind:
        raise ConfigError(
            f"the model is not the one of {start.origin}, whose model.kind is {recipe.model.kind}",
            where="model.kind",
            value=config.model.kind,
            fix="configure the same model, or train from scratch",
        )
    _require_same_options(config, recipe.model)
    files = export.read_export_manifest(start.export_uri, start.export_digest).files
    for name, content in task.assets().items():
        theirs = files[name].sha256 if name in files else "none"
        if theirs != storage.sha256_bytes(content):
            raise ConfigError(
                f"{start.origin} was trained with another {name} than the one of this dataset",
                where="train.from",
                value=theirs[:16],
                fix=f"name {storage.join(start.export_uri, name)} in the section task, or train from scratch",
            )


def _require_same_options(config: Config, exported: ModelConfig) -> None:
    """Raises ConfigError for an option that another one had, even where all shapes are the same."""
    ours, theirs, origin = options_of(config.model), options_of(exported), config.train.initial_weights.origin
    for name in sorted({*ours, *theirs} - TOLD_BY_SHAPES):
        if ours.get(name) != theirs.get(name) and "drop" not in name:  # whatever is dropped is so in training alone
            raise ConfigError(
                f"the model is not the one of {origin}, whose {name} is {theirs.get(name)}",
                where=f"model.{name}",
                value=ours.get(name),
                fix="set it to that, or train from scratch",
            )


TOLD_BY_SHAPES = {"num_kv_heads", "ffn_dim"}
"""Options of built-in models of which 0 stands for a size that the tensors tell."""


def _starting_with(config: Config, train: TrainConfig) -> Config:
    return config.model_copy(update={"train": train})


def _found(config: Config) -> TrainConfig:
    train = config.train
    if train.from_champion:
        champion = registry.champion(config)
        if champion is None:
            return train.starting_with("no champion yet, from scratch")
        return train.starting_with(
            f"version {champion.version}, the champion", champion.export_uri, champion.export_digest
        )
    if train.from_version is not None:
        return _of_version(config, train.from_version)
    uri = _export_uri(config)
    return train.starting_with("an export", uri, export.digest_of_export(uri))


def _of_version(config: Config, number: int) -> TrainConfig:
    version = model_client.get_version(config.tracking.uri, config.model_name, number)
    if version is None:
        fix = "kftrain models compare shows those that there are"
        raise ConfigError(f"{config.model_name} has no such version", where="train.from", value=number, fix=fix)
    reference = lineage.of(config.tracking.uri, version)
    return config.train.starting_with(f"version {number}", reference.export_uri, reference.export_digest)


def _export_uri(config: Config) -> str:
    """That of `train.from`, or of the run that it names."""
    uri = config.train.start_from.rstrip("/")
    Trust.of(config).require_place(uri)
    paths = RunPaths(uri)
    if not storage.exists(paths.complete):
        return uri
    return documents.read(Completion, paths.complete, CheckpointError).export_uri
