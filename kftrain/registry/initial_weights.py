"""Looks up the weights that a run starts with (`train.from`), once, when the run is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kftrain import registry
from kftrain.checkpoint.export import read_recipe
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.errors import CheckpointError, ConfigError
from kftrain.models.settings import ModelConfig
from kftrain.models.signature import options_of
from kftrain.registry import lineage
from kftrain.run import documents, export
from kftrain.run.config import is_opened, read_config
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths
from kftrain.tracking import model_client
from kftrain.trust import Trust

if TYPE_CHECKING:
    from kftrain.tasks import Task
    from kftrain.train.settings import TrainConfig


def with_initial_weights(config: Config, paths: RunPaths, progress: Progress) -> Config:
    """Return the configuration with the weights that `train.from` names: those that the run has kept, or those of now.

    If there is no champion yet, the training starts from scratch and says so. Raises ConfigError for a version that
    does not exist, CheckpointError for an export that is gone, TrackingError.
    """
    train = config.train
    if train.from_scratch:
        return _with_train(config, train.without_weights())
    kept = read_config(paths).train.initial_weights if is_opened(paths) else None
    for known in filter(None, (train.initial_weights, kept)):
        if known.asked == train.start_from:
            return _with_train(config, train.model_copy(update={"initial_weights": known}))
    resolved = _find_weights(config)
    progress(f"train.from {train.start_from}: {resolved.initial_weights.origin}")
    return _with_train(config, resolved)


def require_fit(config: Config, task: Task) -> None:
    """Raise ConfigError if the weights are of another model, or were trained with other files than the task reads.

    Shapes are compared when the weights are loaded, but equal shapes are not enough: with another tokenizer every
    token would mean something else, and another number of heads would cut the same matrices in another way.
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
    """Raise ConfigError for an option that differs from the exported model's, even if all shapes are the same."""
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


def _with_train(config: Config, train: TrainConfig) -> Config:
    return config.model_copy(update={"train": train})


def _find_weights(config: Config) -> TrainConfig:
    train = config.train
    if train.from_champion:
        champion = registry.champion(config)
        if champion is None:
            return train.starting_with("no champion yet, from scratch")
        return train.starting_with(
            f"version {champion.version}, the champion", champion.export_uri, champion.export_digest
        )
    if train.from_version is not None:
        return _find_version(config, train.from_version)
    uri = _find_export(config)
    return train.starting_with("an export", uri, export.compute_export_digest(uri))


def _find_version(config: Config, number: int) -> TrainConfig:
    version = model_client.get_version(config.tracking.uri, config.model_name, number)
    if version is None:
        fix = "kftrain models compare shows those that there are"
        raise ConfigError(f"{config.model_name} has no such version", where="train.from", value=number, fix=fix)
    reference = lineage.read_reference(config.tracking.uri, version)
    return config.train.starting_with(f"version {number}", reference.export_uri, reference.export_digest)


def _find_export(config: Config) -> str:
    """Return the URI of the export that `train.from` names by itself, or by the folder of a run."""
    uri = config.train.start_from.rstrip("/")
    Trust.of(config).require_place(uri)
    paths = RunPaths(uri)
    if not storage.exists(paths.complete):
        return uri
    return documents.read(Completion, paths.complete, CheckpointError).export_uri
