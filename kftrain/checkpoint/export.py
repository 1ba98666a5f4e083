"""Export: the model alone, as safetensors with its configuration, for evaluation, serving and the registry.

    export/<checkpoint digest>/
      model.safetensors          or model-00001-of-0000N.safetensors with model.safetensors.index.json
      config.json                the model's configuration; for the transformer a Hugging Face Llama config
      kftrain.json               how kftrain rebuilds model and task
      tokenizer.json …           the task's own files
      manifest.json              every file's bytes and sha256; its own digest is the export's digest

Here it is read (`exporting.py` writes it): safetensors and JSON only. Files are found in the manifest; the index is for
other programs, and nothing here follows it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kftrain import storage
from kftrain.checkpoint.allowance import limited_to
from kftrain.errors import CheckpointError
from kftrain.models import build_model
from kftrain.models.registry import BUILT_IN as MODELS
from kftrain.models.settings import ModelConfig
from kftrain.plugins import user_code
from kftrain.run import commit, documents
from kftrain.run.export import (
    ExportManifest,
    read_export_manifest,
    require_whole,
)
from kftrain.tasks import build_task
from kftrain.tasks.base import Task
from kftrain.tasks.registry import BUILT_IN as TASKS
from kftrain.tasks.settings import TaskConfig
from kftrain.trust import Trust

if TYPE_CHECKING:
    import torch
    from torch import nn

MAX_DOCUMENT_BYTES = 16 << 20
"""Of a description: what is read as JSON takes many times its size."""

MAX_TASK_FILE_BYTES = 64 << 20
"""Of a file of the task's own."""

DESCRIPTION = "kftrain.json"


class Description(documents.Document):
    """`kftrain.json`: what rebuilds model and task."""

    model: dict[str, Any]
    task: dict[str, Any]
    model_arguments: dict[str, Any]
    """What the task told the model: vocabulary size, number of classes …"""


@dataclass(frozen=True)
class Recipe:
    """A description whose kinds may be built here."""

    model: ModelConfig
    task: TaskConfig
    model_arguments: dict[str, Any]


@dataclass(frozen=True)
class ExportedState:
    """The tensors of an export, on the CPU, and what says how its model is built."""

    recipe: Recipe
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class LoadedExport:
    """A trained model, in evaluation mode on the CPU, with its task."""

    model: nn.Module
    task: Task
    config: dict[str, Any]


def verify_export(uri: str, digest: str) -> ExportManifest:
    """The manifest of an export whose every file was checked. Raises CheckpointError."""
    return require_whole(uri, digest, contents=True)


def read_recipe(uri: str, digest: str, trust: Trust) -> Recipe:
    """What an export is made of, where it is whole and may be loaded here; tensors are not read, nothing is built.

    Raises ConfigError for what the reader does not allow, CheckpointError for an export that is damaged or incomplete.
    """
    trust.require_place(uri)
    return _recipe(uri, require_whole(uri, digest), trust)


def load_export(uri: str, digest: str, trust: Trust | None = None) -> LoadedExport:
    """The model and the task of an export.

    Exactly the files of its manifest are read, each once, and the bytes that were checked are the ones that are loaded.

    Args:
        uri: Folder of the export.
        digest: Of the export.
        trust: What it may be made of, and where it may lie; None: as for a reader without a configuration.

    Raises ConfigError for what the reader does not allow, CheckpointError for an export that is damaged, UserCodeError.
    """
    trust = trust or Trust.by_default()
    trust.require_place(uri)
    manifest = read_export_manifest(uri, digest)
    recipe = _recipe(uri, manifest, trust)
    try:
        config = json.loads(_content(uri, manifest, "config.json"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError("config.json is not valid JSON", where=uri, fix="export the checkpoint again") from error
    num_bytes = _num_tensor_bytes(uri, manifest)
    try:
        with limited_to(num_bytes, storage.join(uri, DESCRIPTION)):
            task, model = build_task(recipe.task), build_model(recipe.model, recipe.model_arguments)
    except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
        what = f"{DESCRIPTION} describes no model that can be built: {error}"
        raise CheckpointError(what, where=uri, fix="export the checkpoint again") from error
    _restore(task, uri, manifest)
    _fill(model, uri, manifest)
    return LoadedExport(model.eval(), task, config)


def load_state(uri: str, digest: str, trust: Trust) -> ExportedState:
    """The tensors of an export, by name, for a model that is there already; nothing is built of its description.

    As `load_export`, only what the manifest lists is read, and loaded are the bytes that were checked. Raises
    ConfigError for what the reader does not allow, CheckpointError for an export that is damaged or incomplete.
    """
    trust.require_place(uri)
    manifest = read_export_manifest(uri, digest)
    recipe = _recipe(uri, manifest, trust)
    tensors: dict[str, torch.Tensor] = {}
    for name in _tensor_files(uri, manifest):
        tensors |= _tensors(uri, manifest, name)
    return ExportedState(recipe, tensors)


def _restore(task: Task, uri: str, manifest: ExportManifest) -> None:
    """Gives the task the files that it was trained with, from the export alone."""
    if task.asset_names:
        with user_code("task.restore"):
            task.restore({name: _content(uri, manifest, name, MAX_TASK_FILE_BYTES) for name in task.asset_names})


def _recipe(uri: str, manifest: ExportManifest, trust: Trust) -> Recipe:
    """What `kftrain.json` describes. Raises ConfigError for kinds that may not be built here."""
    where = storage.join(uri, DESCRIPTION)
    found = documents.parse(Description, _content(uri, manifest, DESCRIPTION), where, CheckpointError)
    try:
        model, task = ModelConfig.model_validate(found.model), TaskConfig.model_validate(found.task)
    except ValidationError as error:
        what = f"{DESCRIPTION} is damaged: {error.errors()[0]['msg']}"
        raise CheckpointError(what, where=where, fix="export the checkpoint again") from error
    trust.require_kind("model", model.kind, MODELS)
    trust.require_kind("task", task.kind, TASKS)
    return Recipe(model, task, found.model_arguments)


def _content(uri: str, manifest: ExportManifest, name: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    if name not in manifest.files:
        raise CheckpointError(f"the export has no {name}", where=uri, fix="export the checkpoint again")
    if not name.endswith(".safetensors") and manifest.files[name].bytes > max_bytes:
        what = f"a description is larger than {max_bytes} bytes"
        raise CheckpointError(what, where=storage.join(uri, name), value=manifest.files[name].bytes)
    return commit.read_verified(storage.join(uri, name), manifest.files[name])


def _tensor_files(uri: str, manifest: ExportManifest) -> list[str]:
    names = sorted(name for name in manifest.files if name.endswith(".safetensors"))
    if not names:
        raise CheckpointError("the export holds no tensors", where=uri, fix="export the checkpoint again")
    return names


def _num_tensor_bytes(uri: str, manifest: ExportManifest) -> int:
    """Size of the files of tensors, which are seen to be there: a manifest can claim any size."""
    files = {name: manifest.files[name] for name in _tensor_files(uri, manifest)}
    for name, entry in files.items():
        commit.require_size(storage.join(uri, name), entry)
    return sum(entry.bytes for entry in files.values())


def _fill(model: nn.Module, uri: str, manifest: ExportManifest) -> None:
    """Gives the model the tensors of the export, one file in memory at a time."""
    missing, unexpected = set(model.state_dict()), set[str]()
    for name in _tensor_files(uri, manifest):
        tensors = _tensors(uri, manifest, name)
        try:
            keys = model.load_state_dict(tensors, strict=False)
        except (RuntimeError, LookupError) as error:
            said = " ".join(str(error).splitlines()[:2])
            raise CheckpointError(f"the tensors do not fit the model: {said}", where=storage.join(uri, name)) from error
        missing, unexpected = missing & set(keys.missing_keys), unexpected | set(keys.unexpected_keys)
    if wrong := unexpected | (missing - set(_tied_names(model))):
        raise CheckpointError("the tensors do not fit the model", where=uri, value=sorted(wrong)[:5])


def _tensors(uri: str, manifest: ExportManifest, name: str) -> dict[str, torch.Tensor]:
    """Those of one file, from the bytes that were checked."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(_content(uri, manifest, name))
    except (SafetensorError, RuntimeError, LookupError) as error:
        said = " ".join(str(error).splitlines()[:2])
        raise CheckpointError(f"the tensors do not fit the model: {said}", where=storage.join(uri, name)) from error


def _tied_names(model: nn.Module) -> list[str]:
    """Names of parameters that are another parameter under a second name: a file holds them once."""
    seen: dict[int, str] = {}
    tied = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            tied.append(name)
        seen.setdefault(id(parameter), name)
    return tied
