"""Reading `torch.distributed.checkpoint` folders without running what somebody may have put into them.

DCP unpickles `.metadata`, and what is no tensor. A pickle can name any function to call; the digests of the commit
protocol tell damage from intent, but not one writer from another. So here a pickle may name the classes that DCP writes
and nothing else, and the rest is read by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as metadata_module
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from kftrain.checkpoint.files import CheckpointFiles
from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError
from kftrain.run.commit import FileEntry

_METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *((_METADATA, f"{kind}StorageMetadata") for kind in ("Bytes", "Chunk", "Tensor")),
        (_METADATA, "TensorProperties"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
)
"""Pairs (module, name) that DCP's metadata is made of, beside dtypes and paths."""

PATHS = frozenset((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows"))
"""The folder that it was written to, as the writer's Python and system name it: not looked at, and so only text."""


def _member(kind: Any, name: str) -> Any:
    """Replace `getattr`, by which Python before 3.11.4 pickles enumerations: allow members of DCP's only one."""
    if kind is not metadata_module._MEM_FORMAT_ENCODING:
        raise CheckpointError("the metadata asks for an attribute, and is not read", value=f"{kind}.{name}")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PATHS:
            return PurePosixPath
        if (module, name) == ("builtins", "getattr"):
            return _member
        # Dtypes by what they are, since they are many, and whatever has this type runs nothing.
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in ALLOWED and not is_dtype:
            raise CheckpointError(
                "the metadata names what no checkpoint holds, and is not read",
                value=f"{module}.{name}",
                fix="find out who has written it",
            )
        return super().find_class(module, name)


class _SafeMetadata:
    """A mixin over a DCP reader that reads the same metadata in a safe way."""

    files: Mapping[str, FileEntry]

    def read_metadata(self: Any, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            content = stream.read()  # once: the bytes that are hashed are the ones that are unpickled
        expected = self.files.get(PurePosixPath(path).name)
        if expected is None or storage.sha256_bytes(content) != expected.sha256:
            raise CheckpointError("the metadata is not the one of the checkpoint's manifest", where=str(path))
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError("the metadata is none", value=type(metadata).__name__)
        # Here, where each process reads it: none opens a file whose digest nobody has checked.
        _require_own_files(metadata, self.files)
        # As DCP's own reader does, which this method replaces.
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _require_own_files(metadata: Metadata, files: Mapping[str, FileEntry]) -> None:
    """Raises CheckpointError where an entry lies in another file than those whose digests were checked."""
    for entry in (metadata.storage_data or {}).values():
        if not isinstance(entry, _StorageInfo) or entry.relative_path not in files:
            name = getattr(entry, "relative_path", entry)
            raise CheckpointError("the metadata names a file that is none of the checkpoint's", value=name)


class _LocalReader(_SafeMetadata, dcp.filesystem.FileSystemReader):
    """A reader of a folder on this machine."""


class _RemoteReader(_SafeMetadata, dcp.filesystem.FileSystemReader):
    """A reader of a folder in object storage, by streams that have deadlines and ride an outage out."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        files: Any = CheckpointFiles()
        self.fs = files
        self.path = files.init_path(uri)


class SafePlanner(DefaultLoadPlanner):
    """Loads into a state as DCP's own planner does; what is no tensor must be numbers, text and the like."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Puts one entry that is no tensor into the state."""
        entry = torch.load(value, weights_only=True)
        keys = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, keys, entry)


def require_readable(model: nn.Module) -> None:
    """Raises ConfigError where a model keeps something beside its tensors that could be saved but not be read again."""
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            continue
        content = io.BytesIO()
        torch.save(value, content)
        content.seek(0)
        try:
            torch.load(content, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ConfigError(
                "the model keeps what cannot be read from a checkpoint in a safe way",
                where=f"model {name}",
                value=type(value).__name__,
                fix="keep tensors, numbers, text, and lists and dicts of them",
            ) from error


def reader(uri: str, files: Mapping[str, FileEntry]) -> Any:
    """A DCP reader of a checkpoint folder that reads the files of its manifest and no others.

    Its errors are CheckpointErrors where the metadata is not DCP's or not of these files.
    """
    if storage.is_local(uri):
        result: Any = _LocalReader(storage.local_path(uri))
    else:
        result = _RemoteReader(uri)
    result.files = files
    return result


def fill_state(state: dict[str, Any], uri: str, files: Mapping[str, FileEntry], *, alone: bool = False) -> None:
    """Fills the tensors of `state` in place; collective, unless this process is to do it `alone`.

    Raises DCP's CheckpointException.
    """
    dcp.state_dict_loader.load(state, storage_reader=reader(uri, files), planner=SafePlanner(), no_dist=alone)
