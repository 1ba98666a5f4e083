"""Export: the model alone, as safetensors with its configuration, for evaluation, serving and the registry.

    export/<checkpoint digest>/
      model.safetensors          or model-00001-of-0000N.safetensors with model.safetensors.index.json
      config.json                the model's configuration; for the transformer a Hugging Face Llama config
      kftrain.json               how kftrain rebuilds model and task
      manifest.json              every file's bytes and sha256; its own digest is the export's digest

Made from the committed checkpoint, not from the live model: tensors are read back one file at a time, so memory stays
at the size of one file however large the model is, and the export is of what was verified. No pickle is written;
loading reads safetensors and JSON only.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kftrain import contracts, storage
from kftrain.checkpoint import commit
from kftrain.checkpoint.commit import FileEntry
from kftrain.config import ModelConfig, TaskConfig
from kftrain.contracts import RunPaths
from kftrain.errors import CheckpointError, RetryableError
from kftrain.models import build_model
from kftrain.tasks import build_task
from kftrain.tasks.base import Task

if TYPE_CHECKING:
    from torch import nn

MAX_FILE_BYTES = 2 << 30
"""Tensors are collected into files of at most this size (a larger tensor has a file of its own)."""

MANIFEST = "manifest.json"
MODEL_PREFIX = "model."
"""Keys of the model in a checkpoint's state."""


class Description(contracts.Document):
    """`kftrain.json`: what rebuilds model and task."""

    model: dict[str, Any]
    task: dict[str, Any]
    model_arguments: dict[str, Any]
    """What the task told the model: vocabulary size, number of classes …"""


class ExportManifest(contracts.Document):
    """`manifest.json` of an export."""

    checkpoint_digest: str
    training_digest: str
    dataset_digest: str
    step: int
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class LoadedExport:
    """A trained model, in evaluation mode on the CPU, with its task."""

    model: nn.Module
    task: Task
    config: dict[str, Any]


def export_checkpoint(
    paths: RunPaths, checkpoint_uri: str, description: Description, config: dict[str, Any]
) -> tuple[str, str]:
    """Writes the export of a committed checkpoint, if it is not there yet; returns its URI and digest.

    Every file of the checkpoint is verified before one is unpickled. One process suffices. Raises CheckpointError, and
    RetryableError if the export that comes to lie there is not the one that was written.
    """
    manifest, digest = commit.read_manifest(checkpoint_uri)
    uri = paths.export(digest)
    if not _is_whole(uri):
        commit.verify_files(checkpoint_uri, manifest.files)
        storage.remove(storage.join(uri, MANIFEST))  # first: nobody takes for an export what is being deleted
        storage.remove(uri)  # what a process that was killed here has left, or somebody has deleted half of
        with storage.new_folder(uri) as folder:
            _write_tensors(checkpoint_uri, folder)
            (folder / "config.json").write_text(storage.dump_json(config))
            (folder / "kftrain.json").write_text(storage.dump_json(description.to_dict()))
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
        storage.publish_json(storage.join(uri, MANIFEST), export.to_dict())  # last: it says that the others are there
    return uri, export_digest(uri)


def _is_whole(uri: str) -> bool:
    """Whether an export is there with all its files; one with a damaged manifest is none."""
    try:
        manifest = contracts.read(ExportManifest, storage.join(uri, MANIFEST), CheckpointError)
    except CheckpointError:
        return False
    return commit.has_files(uri, manifest.files)


def export_digest(uri: str) -> str:
    """Digest of an export: the sha256 of its manifest. Raises CheckpointError where there is none."""
    try:
        return storage.sha256_file(storage.join(uri, MANIFEST))
    except FileNotFoundError as error:
        raise CheckpointError("no export here", where=uri, fix="run: kftrain checkpoints export") from error


def verify_export(uri: str, digest: str) -> ExportManifest:
    """The manifest of an export whose every file was checked. Raises CheckpointError."""
    actual = export_digest(uri)
    if actual != digest:
        raise CheckpointError(f"the export is not the expected one, {digest[:16]}", where=uri, value=actual[:16])
    manifest = contracts.read(ExportManifest, storage.join(uri, MANIFEST), CheckpointError)
    commit.verify_files(uri, manifest.files)
    return manifest


def load_export(uri: str, digest: str) -> LoadedExport:
    """The model and the task of an export: fetched, verified, built. Raises CheckpointError."""
    manifest = verify_export(uri, digest)
    if storage.is_local(uri):
        return _load_folder(storage.local_path(uri))
    with tempfile.TemporaryDirectory(prefix="kftrain-export-") as folder:
        for name in [*manifest.files, MANIFEST]:
            (Path(folder) / name).write_bytes(storage.read_bytes(storage.join(uri, name)))
        return _load_folder(Path(folder))


def _load_folder(folder: Path) -> LoadedExport:
    from safetensors.torch import load_file

    description = contracts.read(Description, str(folder / "kftrain.json"), CheckpointError)
    task = build_task(TaskConfig.model_validate(description.task))
    model = build_model(ModelConfig.model_validate(description.model), description.model_arguments)
    state: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state.update(load_file(path))
    missing, unexpected = model.load_state_dict(state, strict=False)
    aliases = set(_tied_names(model))
    if unexpected or set(missing) - aliases:
        raise CheckpointError(
            "the tensors do not fit the model", where=str(folder), value=sorted({*missing, *unexpected})[:5]
        )
    config = json.loads((folder / "config.json").read_text())
    return LoadedExport(model.eval(), task, config)


def _tied_names(model: nn.Module) -> list[str]:
    """Names of parameters that are another parameter under a second name: a file holds them once."""
    seen: dict[int, str] = {}
    tied = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            tied.append(name)
        seen.setdefault(id(parameter), name)
    return tied


def _write_tensors(checkpoint_uri: str, folder: Path) -> None:
    """Copies the model's tensors from a checkpoint into safetensors files, one file in memory at a time."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from kftrain.checkpoint import reader

    metadata = reader.reader(checkpoint_uri).read_metadata().state_dict_metadata
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
            reader.load(state, checkpoint_uri, alone=True)
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
