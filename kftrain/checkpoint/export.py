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

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.errors import CheckpointError
from kftrain.models import build_model
from kftrain.models.registry import BUILT_IN as MODELS
from kftrain.models.settings import ModelConfig
from kftrain.process import machine
from kftrain.run import commit, documents
from kftrain.run.export import (
    ExportManifest,
    list_tensor_entries,
    read_export_manifest,
    require_whole,
)
from kftrain.tasks import build_task
from kftrain.tasks.base import Task
from kftrain.tasks.registry import BUILT_IN as TASKS
from kftrain.tasks.settings import TaskConfig
from kftrain.trust import Trust

if TYPE_CHECKING:
    from torch import nn

    from kftrain.checkpoint.filling import ModelSlots
    from kftrain.parallel.world import World

MAX_DOCUMENT_BYTES = 16 << 20
"""Largest description that is read: parsed JSON takes many times its size."""

MAX_TASK_FILE_BYTES = 64 << 20
"""Largest file of the task's own that is read."""

DESCRIPTION = "kftrain.json"


class Description(documents.Document):
    """Content of `kftrain.json`: what rebuilds model and task."""

    model: dict[str, Any]
    task: dict[str, Any]
    model_arguments: dict[str, Any]
    """Arguments that the task gave the model: vocabulary size, number of classes …"""


@dataclass(frozen=True)
class Recipe:
    """A description whose kinds may be built here."""

    model: ModelConfig
    task: TaskConfig
    model_arguments: dict[str, Any]


@dataclass(frozen=True)
class LoadedExport:
    """A trained model, in evaluation mode on the CPU, with its task."""

    model: nn.Module
    task: Task
    config: dict[str, Any]


@dataclass(frozen=True)
class EmptyExport:
    """A model whose parameters have no memory yet, in evaluation mode, with its task."""

    uri: str
    manifest: ExportManifest
    recipe: Recipe
    model: nn.Module
    task: Task
    config: dict[str, Any]

    def rebuilt(self) -> EmptyExport:
        """Build the model once more, untouched; return it with the same task."""
        model = _build_empty(self.uri, self.manifest, self.recipe)
        _attach_tables(model, self.uri, self.manifest)
        return replace(self, model=model)


def verify_export(uri: str, digest: str) -> ExportManifest:
    """Check every file of an export; return its manifest. Raises CheckpointError."""
    return require_whole(uri, digest, contents=True)


def read_recipe(uri: str, digest: str, trust: Trust) -> Recipe:
    """Read which model and task an export holds; it must be whole. No tensor is read, nothing is built.

    Raises ConfigError for what the reader does not allow, CheckpointError for an export that is damaged or incomplete.
    """
    trust.require_place(uri)
    return _parse_recipe(uri, require_whole(uri, digest), trust)


def load_export(uri: str, digest: str, trust: Trust | None = None) -> LoadedExport:
    """Load the model and the task of an export.

    Exactly the files of its manifest are read, each once, and the bytes that were checked are the ones that are loaded:
    tensor by tensor into the model, which is all that is in memory.

    Args:
        uri: Folder of the export.
        digest: Digest of the export.
        trust: Kinds and places that are allowed; None: those of a reader without a configuration.

    Raises ConfigError for what the reader does not allow, CheckpointError for an export that is damaged, or larger than
    the memory that is left, UserCodeError.
    """
    empty = read_empty(uri, digest, trust or Trust.by_default())
    _require_memory(empty)
    fill(empty, empty.model)
    return LoadedExport(empty.model, empty.task, empty.config)


def read_empty(uri: str, digest: str, trust: Trust) -> EmptyExport:
    """Build the model, without weights, and the task of an export; no tensors are read. Raises as `load_export`."""
    trust.require_place(uri)
    manifest = read_export_manifest(uri, digest)
    recipe = _parse_recipe(uri, manifest, trust)
    content = _read_file(uri, manifest, "config.json")
    config = storage.decode_json(content, storage.join(uri, "config.json"), CheckpointError)
    model, task = _build_empty(uri, manifest, recipe), build_task(recipe.task)
    _attach_tables(model, uri, manifest)
    _restore(task, uri, manifest)
    return EmptyExport(uri, manifest, recipe, model, task, config)


def fill(
    empty: EmptyExport,
    model: nn.Module,
    slots: ModelSlots | None = None,
    world: World | None = None,
    on_host: bool = False,
) -> None:
    """Fill a model with the tensors of the export, on several processes each with its own parts. Collective.

    Args:
        empty: Export that the model was built from.
        model: The model as it is now, perhaps wrapped and spread over processes.
        slots: Its places before that; None: it is as it was built.
        world: Processes that it is spread over.
        on_host: Fill memory of the host, whatever the device.

    Raises CheckpointError if a tensor is missing, damaged, or of another shape.
    """
    from kftrain.checkpoint import export_tensors, filling

    slots = slots or filling.ModelSlots(model)
    with export_tensors.open_tensors(empty.uri, empty.manifest, world) as tensors:
        if misfit := slots.misfit(tensors.forms):
            raise CheckpointError(f"the tensors do not fit the model: {misfit}", where=empty.uri)
        slots.fill(model, tensors, world, on_host)


def _build_empty(uri: str, manifest: ExportManifest, recipe: Recipe) -> nn.Module:
    """Build the described model without memory for its parameters. Raises CheckpointError if that is impossible."""
    from kftrain.checkpoint.filling import is_fillable
    from kftrain.parallel.initialize import construct_empty

    num_bytes = _sum_tensor_bytes(uri, manifest)

    def construct() -> nn.Module:
        with limit_parameters(num_bytes, storage.join(uri, DESCRIPTION)):
            return build_model(recipe.model, recipe.model_arguments)

    try:
        model = construct_empty(construct)
        # What a constructor has computed from weights without values, and no file holds, must be computed: build it
        # once more, with memory.
        return (model if is_fillable(model) else construct()).eval()
    except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
        what = f"{DESCRIPTION} describes no model that can be built: {error}"
        raise CheckpointError(what, where=uri, fix="export the checkpoint again") from error


def _attach_tables(model: nn.Module, uri: str, manifest: ExportManifest) -> None:
    from kftrain.checkpoint.table_source import DOCUMENT, read_tables
    from kftrain.models.sparse_embedding import attach_tables

    if DOCUMENT in manifest.files:
        attach_tables(model, read_tables(uri, manifest.files))


def _require_memory(empty: EmptyExport) -> None:
    """Raise CheckpointError if the weights are larger than the memory that is left: the kernel would just kill us."""
    needed = sum(parameter.numel() * parameter.dtype.itemsize for parameter in empty.model.parameters())
    available = machine.read_available_bytes()
    if needed > available:
        raise CheckpointError(
            f"the model needs {needed / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB are available",
            where=empty.uri,
            fix="load it on a machine with more memory, or raise the limit of the container",
        )


def _restore(task: Task, uri: str, manifest: ExportManifest) -> None:
    """Give the task the files that it was trained with, from the export alone."""
    if task.asset_names:
        with user_code("task.restore"):
            task.restore({name: _read_file(uri, manifest, name, MAX_TASK_FILE_BYTES) for name in task.asset_names})


def _parse_recipe(uri: str, manifest: ExportManifest, trust: Trust) -> Recipe:
    """Parse `kftrain.json`. Raises ConfigError for kinds that may not be built here."""
    where = storage.join(uri, DESCRIPTION)
    description = documents.parse_document(Description, _read_file(uri, manifest, DESCRIPTION), where, CheckpointError)
    try:
        model, task = ModelConfig.model_validate(description.model), TaskConfig.model_validate(description.task)
    except ValidationError as error:
        what = f"{DESCRIPTION} is damaged: {error.errors()[0]['msg']}"
        raise CheckpointError(what, where=where, fix="export the checkpoint again") from error
    # Before anything is built: building imports the code that a kind names.
    trust.require_kind("model", model.kind, MODELS)
    trust.require_kind("task", task.kind, TASKS)
    return Recipe(model, task, description.model_arguments)


def _read_file(uri: str, manifest: ExportManifest, name: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    if name not in manifest.files:
        raise CheckpointError(f"the export has no {name}", where=uri, fix="export the checkpoint again")
    if manifest.files[name].bytes > max_bytes:  # the manifest's size, which the file must have to be read at all
        what = f"a description is larger than {max_bytes} bytes"
        raise CheckpointError(what, where=storage.join(uri, name), value=manifest.files[name].bytes)
    return commit.read_verified(storage.join(uri, name), manifest.files[name])


def _sum_tensor_bytes(uri: str, manifest: ExportManifest) -> int:
    """Sum the sizes of the files of tensors, after checking that they are there: a manifest can claim any size."""
    files = list_tensor_entries(uri, manifest.files)
    for name, entry in files.items():
        commit.require_size(storage.join(uri, name), entry)
    return sum(entry.bytes for entry in files.values())


ENTRY_BYTES = 16
"""Bytes that count for each parameter beside its numbers; its entry in a file's header has over three times as many."""


@contextlib.contextmanager
def limit_parameters(num_bytes: int, where: str) -> Iterator[None]:
    """Let this thread make no more parameters within the block than files of so many bytes hold.

    Raises CheckpointError. A description of someone else's could else claim memory without end.

    A number counts as one byte, so that a model of which the files hold two or more may also make a parameter and
    replace it.

    Args:
        num_bytes: Size of the files of tensors.
        where: URI of the description, for the error.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    # The hook is for the whole process: models that other threads build do not count. A weak reference beside the id,
    # which Python gives to another object once the parameter is gone.
    thread, left = threading.get_ident(), num_bytes
    seen: dict[int, weakref.ref[nn.Parameter]] = {}

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal left
        known = seen.get(id(parameter))
        if parameter is None or threading.get_ident() != thread or (known is not None and known() is parameter):
            return
        seen[id(parameter)] = weakref.ref(parameter)
        left -= parameter.numel() + ENTRY_BYTES
        if left < 0:
            raise CheckpointError("the model that it describes is larger than its tensors", where=where)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
