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
    read_export_manifest,
    require_whole,
    tensor_entries,
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
        """Another one, whose model nobody has touched."""
        return replace(self, model=_built(self.uri, self.manifest, self.recipe))


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

    Exactly the files of its manifest are read, each once, and the bytes that were checked are the ones that are loaded:
    tensor by tensor into the model, which is all that is in memory.

    Args:
        uri: Folder of the export.
        digest: Of the export.
        trust: What it may be made of, and where it may lie; None: as for a reader without a configuration.

    Raises ConfigError for what the reader does not allow, CheckpointError for an export that is damaged, or larger than
    the memory that is left, UserCodeError.
    """
    empty = read_empty(uri, digest, trust or Trust.by_default())
    _require_memory(empty)
    fill(empty, empty.model)
    return LoadedExport(empty.model, empty.task, empty.config)


def read_empty(uri: str, digest: str, trust: Trust) -> EmptyExport:
    """The model and the task of an export, but for the weights: no file of tensors is read. Raises as `load_export`."""
    trust.require_place(uri)
    manifest = read_export_manifest(uri, digest)
    recipe = _recipe(uri, manifest, trust)
    content = _content(uri, manifest, "config.json")
    config = storage.decode_json(content, storage.join(uri, "config.json"), CheckpointError)
    model, task = _built(uri, manifest, recipe), build_task(recipe.task)
    _restore(task, uri, manifest)
    return EmptyExport(uri, manifest, recipe, model, task, config)


def fill(
    empty: EmptyExport,
    model: nn.Module,
    slots: ModelSlots | None = None,
    world: World | None = None,
    on_host: bool = False,
) -> None:
    """Gives a model the tensors of the export, on several processes of each the process's part. Collective.

    Args:
        empty: What the model was built from.
        model: What became of it since.
        slots: Of it before that; None: it is as it was.
        world: The processes that it is spread over.
        on_host: In the host's memory, whatever the device.

    Raises CheckpointError where a tensor is missing, damaged, or of another shape.
    """
    from kftrain.checkpoint import export_tensors, filling

    found = slots or filling.ModelSlots(model)
    with export_tensors.opened(empty.uri, empty.manifest, world) as tensors:
        if misfit := found.misfit(tensors.forms):
            raise CheckpointError(f"the tensors do not fit the model: {misfit}", where=empty.uri)
        found.fill(model, tensors, world, on_host)


def _built(uri: str, manifest: ExportManifest, recipe: Recipe) -> nn.Module:
    """The model that is described, without memory for its parameters. Raises CheckpointError where that cannot be."""
    from kftrain.checkpoint.filling import is_fillable
    from kftrain.parallel.initialize import construct_empty

    num_bytes = _num_tensor_bytes(uri, manifest)

    def construct() -> nn.Module:
        with limited_to(num_bytes, storage.join(uri, DESCRIPTION)):
            return build_model(recipe.model, recipe.model_arguments)

    try:
        model = construct_empty(construct)
        return (model if is_fillable(model) else construct()).eval()
    except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
        what = f"{DESCRIPTION} describes no model that can be built: {error}"
        raise CheckpointError(what, where=uri, fix="export the checkpoint again") from error


def _require_memory(empty: EmptyExport) -> None:
    """Raises CheckpointError where the weights are larger than the memory that is left: the kernel would say less."""
    needed = sum(parameter.numel() * parameter.dtype.itemsize for parameter in empty.model.parameters())
    available = machine.available_bytes()
    if needed > available:
        raise CheckpointError(
            f"the model needs {needed / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB are available",
            where=empty.uri,
            fix="load it on a machine with more memory, or raise the limit of the container",
        )


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
    if manifest.files[name].bytes > max_bytes:
        what = f"a description is larger than {max_bytes} bytes"
        raise CheckpointError(what, where=storage.join(uri, name), value=manifest.files[name].bytes)
    return commit.read_verified(storage.join(uri, name), manifest.files[name])


def _num_tensor_bytes(uri: str, manifest: ExportManifest) -> int:
    """Size of the files of tensors, which are seen to be there: a manifest can claim any size."""
    files = tensor_entries(uri, manifest.files)
    for name, entry in files.items():
        commit.require_size(storage.join(uri, name), entry)
    return sum(entry.bytes for entry in files.values())


ENTRY_BYTES = 16
"""Counted for each parameter beside its numbers. Its entry in a file's header has more than three times as many."""


@contextlib.contextmanager
def limited_to(num_bytes: int, where: str) -> Iterator[None]:
    """Within the block this thread makes no more parameters than files of so many bytes hold. Raises CheckpointError.

    A number counts as one byte, so that a model of which the files hold two or more may also make a parameter and
    replace it.

    Args:
        num_bytes: Size of the files of tensors.
        where: The description, for the error.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

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
