"""Writing exports: the model alone, in files of tensors, from a committed checkpoint of any layout.

Made from the committed checkpoint, not from the live model, so the export is of what was verified. Tensors go from the
checkpoint's files into the export's piece by piece, and are hashed on the way: memory stays at one chunk of one tensor
however large the model is. An object store gets them at once; on this machine they are written aside. No pickle is
written.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kftrain.checkpoint.export import DESCRIPTION, Description
from kftrain.core import storage
from kftrain.errors import ConfigError, RetryableError
from kftrain.run import commit
from kftrain.run.commit import FileEntry
from kftrain.run.export import ExportManifest, build_manifest_uri, compute_export_digest, is_export
from kftrain.run.paths import RunPaths

if TYPE_CHECKING:
    from torch import nn

MAX_FILE_BYTES = 2 << 30
"""Largest file of collected tensors (a larger tensor has a file of its own)."""

INDEX = "model.safetensors.index.json"
"""File that maps tensors to files, for other programs; kftrain itself reads what the manifest lists."""

MODEL_PREFIX = "model."
"""Keys of the model in a checkpoint's state."""

AVERAGES_PREFIX = "averages.weights."
"""Keys of the averages of its weights, where the training has some: these are exported in their place."""

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,80}")

Files = dict[str, FileEntry]
CopyTensors = Callable[[str], Files]


def export_checkpoint(
    paths: RunPaths,
    checkpoint_uri: str,
    description: Description,
    config: dict[str, Any],
    task_files: Mapping[str, bytes] = MappingProxyType({}),
    copy_tensors: CopyTensors | None = None,
) -> tuple[str, str]:
    """Write the export of a committed checkpoint, if it is not there yet; return its URI and digest.

    `task_files`: the task's own, name -> content. `copy_tensors`: writes the files of tensors into a folder and returns
    them; None: they are made of the checkpoint.

    Every file of the checkpoint is verified before one is unpickled. One process suffices. Raises CheckpointError, and
    RetryableError if the export that comes to lie there is not the one that was written.
    """
    manifest, digest = commit.read_checkpoint_manifest(checkpoint_uri)
    uri = paths.export(digest)
    if not is_export(uri):
        for name in task_files:
            require_task_file(name)
        documents: dict[str, str | bytes] = {
            "config.json": storage.dump_json(config),
            DESCRIPTION: storage.dump_json(description.to_dict()),
        }
        commit.verify_files(checkpoint_uri, manifest.files)
        storage.remove(build_manifest_uri(uri))  # first: nobody takes for an export what is being deleted
        storage.remove(uri)  # what a process that was killed here has left, or somebody has deleted half of
        with _open_folder(uri) as folder:
            files = copy_tensors(folder) if copy_tensors else _write_tensors(checkpoint_uri, manifest.files, folder)
            files |= _write_tables(checkpoint_uri, manifest.files, folder)
            for name, content in {**documents, **task_files}.items():
                files[name] = _write(folder, name, content)
        export = ExportManifest(
            checkpoint_digest=digest,
            training_digest=manifest.training_digest,
            dataset_digest=manifest.dataset_digest,
            step=manifest.step,
            files=dict(sorted(files.items())),
        )
        if not commit.has_files(uri, files):  # the old folder could not be deleted, or another process made one
            raise RetryableError("other files than the ones of this export are in its folder", where=uri)
        storage.publish_json(build_manifest_uri(uri), export.to_dict())  # last: it says that the others are there
    return uri, compute_export_digest(uri)


def require_task_file(name: str) -> None:
    """Raise ConfigError for a file of a task whose name is not plain, or is that of another file of an export."""
    taken = {"config.json", DESCRIPTION, "manifest.json"}
    if not _FILE_NAME.fullmatch(name) or name in taken or name.startswith(("model", "table-", "tables.json")):
        raise ConfigError("no name of a task's file", where="task.export_files", value=name, fix="rename it")


def require_types(model: nn.Module) -> None:
    """Raise ConfigError for a tensor whose type an export cannot hold: before the first step, not after the last."""
    import torch

    from kftrain.checkpoint.tensor_files import DTYPES

    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.dtype not in DTYPES.values():
            raise ConfigError(
                "the model keeps numbers that an export cannot hold",
                where=f"model {name}",
                value=value.dtype,
                fix="keep others, or register the buffer with persistent=False",
            )


def group_by_size(sizes: dict[str, int], limit_bytes: int) -> list[list[str]]:
    """Cut names, in order, into groups of at most `limit_bytes` in sum; a larger tensor stands alone."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > limit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


@contextlib.contextmanager
def _open_folder(uri: str) -> Iterator[str]:
    """Yield the place to write a new folder's files: aside on this machine, in their place in an object store."""
    if not storage.is_local(uri):
        yield uri
        return
    with storage.new_folder(uri) as folder:
        yield str(folder)


def _write(folder: str, name: str, content: str | bytes) -> FileEntry:
    encoded = content.encode() if isinstance(content, str) else content
    storage.publish(storage.join(folder, name), encoded)
    return FileEntry(bytes=len(encoded), sha256=storage.sha256_bytes(encoded))


def _write_tables(checkpoint_uri: str, files: Mapping[str, FileEntry], folder: str) -> Files:
    from kftrain.checkpoint.table_source import write_table_exports

    return write_table_exports(checkpoint_uri, files, folder)


def _write_tensors(checkpoint_uri: str, checkpoint_files: Mapping[str, FileEntry], folder: str) -> Files:
    """Copy the model's tensors into files of the format safetensors, one chunk in memory at a time."""
    from kftrain.checkpoint.chunks import StoredChunks

    model = StoredChunks(checkpoint_uri, checkpoint_files, MODEL_PREFIX)
    averages = StoredChunks(checkpoint_uri, checkpoint_files, AVERAGES_PREFIX)
    chunks_of = {name: averages if name in averages.forms else model for name in model.forms}
    sizes = {name: chunks.forms[name].num_bytes for name, chunks in chunks_of.items()}
    groups = group_by_size(sizes, MAX_FILE_BYTES)
    files: Files = {}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        files[name] = _write_file(chunks_of, names, storage.join(folder, name))
        weight_map.update(dict.fromkeys(names, name))
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        files[INDEX] = _write(folder, INDEX, storage.dump_json(index))
    return files


def _write_file(chunks_of: Mapping[str, Any], names: list[str], uri: str) -> FileEntry:
    from kftrain.checkpoint.files import HashingStream
    from kftrain.checkpoint.tensor_files import contents_of, encode_header, sort_names

    forms = {name: chunks_of[name].forms[name] for name in names}
    with storage.simplify_errors(uri, "the export could not be written"), storage.open_write(uri) as stream:
        hashing = HashingStream(stream)
        hashing.write(encode_header(forms))
        for name in sort_names(forms):  # the order that the header has promised
            for rows in chunks_of[name].rows(name):
                hashing.write(contents_of(rows))
    return hashing.entry
