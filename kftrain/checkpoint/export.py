"""Export: the model alone, as safetensors with its configuration, for evaluation, serving and the registry.

    export/<checkpoint digest>/
      model.safetensors          or model-00001-of-0000N.safetensors with model.safetensors.index.json
      config.json                the model's configuration; for the transformer a Hugging Face Llama config
      kftrain.json               how kftrain rebuilds model and task
      tokenizer.json …           the task's own files
      manifest.json              every file's bytes and sha256; its own digest is the export's digest

Made from the committed checkpoint, not from the live model: tensors are read back one file at a time, so memory stays
at the size of one file however large the model is, and the export is of what was verified. No pickle is written;
loading reads safetensors and JSON only.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kftrain import storage
from kftrain.checkpoint.allowance import limited_to
from kftrain.errors import CheckpointError, ConfigError, RetryableError
from kftrain.models import build_model
from kftrain.models.registry import BUILT_IN as MODELS
from kftrain.models.settings import ModelConfig
from kftrain.plugins import user_code
from kftrain.run import commit, documents
from kftrain.run.commit import FileEntry
from kftrain.run.export import (
    ExportManifest,
    digest_of_export,
    is_export,
    manifest_uri,
    read_export_manifest,
    require_whole,
)
from kftrain.run.paths import RunPaths
from kftrain.tasks import build_task
from kftrain.tasks.base import Task
from kftrain.tasks.registry import BUILT_IN as TASKS
from kftrain.tasks.settings import TaskConfig
from kftrain.trust import Trust

if TYPE_CHECKING:
    import torch
    from torch import nn

MAX_FILE_BYTES = 2 << 30
"""Tensors are collected into files of at most this size (a larger tensor has a file of its own)."""

MAX_DOCUMENT_BYTES = 16 << 20
"""Of a description: what is read as JSON takes many times its size."""

MAX_TASK_FILE_BYTES = 64 << 20
"""Of a file of the task's own."""

DESCRIPTION = "kftrain.json"
MODEL_PREFIX = "model."
"""Keys of the model in a checkpoint's state."""

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,80}")


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


def export_checkpoint(
    paths: RunPaths,
    checkpoint_uri: str,
    description: Description,
    config: dict[str, Any],
    task_files: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[str, str]:
    """Writes the export of a committed checkpoint, if it is not there yet; returns its URI and digest.

    `task_files`: the task's own, name -> content.

    Every file of the checkpoint is verified before one is unpickled. One process suffices. Raises CheckpointError, and
    RetryableError if the export that comes to lie there is not the one that was written.
    """
    manifest, digest = commit.read_checkpoint_manifest(checkpoint_uri)
    uri = paths.export(digest)
    if not is_export(uri):
        commit.verify_files(checkpoint_uri, manifest.files)
        storage.remove(manifest_uri(uri))  # first: nobody takes for an export what is being deleted
        storage.remove(uri)  # what a process that was killed here has left, or somebody has deleted half of
        with storage.new_folder(uri) as folder:
            _write_tensors(checkpoint_uri, manifest.files, folder)
            (folder / "config.json").write_text(storage.dump_json(config))
            (folder / DESCRIPTION).write_text(storage.dump_json(description.to_dict()))
            for name, content in task_files.items():
                require_task_file(name)
                (folder / name).write_bytes(content)
            files = {path.name: commit.entry_of(str(path)) for path in sorted(folder.iterdir())}
        export = ExportManifest(
            checkpoint_digest=digest,
            training_digest=manifest.training_digest,
            dataset_digest=manifest.dataset_digest,
            step=manifest.step,
            files=files,
        )
        if not commit.has_files(uri, files):  # the old folder could not be deleted, or another process made one
            raise RetryableError("other files than the ones of this export are in its folder", where=uri)
        storage.publish_json(manifest_uri(uri), export.to_dict())  # last: it says that the others are there
    return uri, digest_of_export(uri)


def require_task_file(name: str) -> None:
    """Raises ConfigError for a file of a task whose name is not plain, or is that of another file of an export."""
    taken = {"config.json", DESCRIPTION, "manifest.json"}
    if not _FILE_NAME.fullmatch(name) or name in taken or name.startswith("model"):
        raise ConfigError("no name of a task's file", where="task.export_files", value=name, fix="rename it")


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


def _write_tensors(checkpoint_uri: str, files: Mapping[str, FileEntry], folder: Path) -> None:
    """Copies the model's tensors from a checkpoint into safetensors files, one file in memory at a time."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from kftrain.checkpoint import reader

    metadata = reader.reader(checkpoint_uri, files).read_metadata().state_dict_metadata
    tensors = {
        name: entry
        for name, entry in sorted(metadata.items())
        if name.startswith(MODEL_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    groups = group_by_size({name: _num_bytes(entry) for name, entry in tensors.items()}, MAX_FILE_BYTES)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(groups, start=1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        state = {name: torch.empty(tensors[name].size, dtype=tensors[name].properties.dtype) for name in names}
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled"
            )  # one process: that is the intent
            reader.load(state, checkpoint_uri, files, alone=True)
        plain = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in state.items()}
        save_file(plain, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(plain, file))
    if len(groups) > 1:
        total = sum(_num_bytes(entry) for entry in tensors.values())
        index_document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(storage.dump_json(index_document))


def group_by_size(sizes: dict[str, int], limit_bytes: int) -> list[list[str]]:
    """Names in order, cut into groups of at most `limit_bytes` in sum; a larger one stands alone."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _num_bytes(entry: Any) -> int:
    return int(entry.size.numel() * entry.properties.dtype.itemsize)
