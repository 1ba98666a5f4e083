"""Loading: the newest committed checkpoint that verifies, on any number of processes.

Every process verifies its share of the files before any of them is unpickled or read; all agree on the outcome. A
damaged checkpoint loses its marker and the one before it is tried. Only a run that never committed anything starts from
scratch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed.checkpoint as dcp

from kftrain import storage
from kftrain.checkpoint import commit
from kftrain.checkpoint.commit import CheckpointManifest, CheckpointName
from kftrain.checkpoint.save import State
from kftrain.contracts import RunPaths
from kftrain.errors import CheckpointError, KftrainError, error_from_dict
from kftrain.parallel.world import World


@dataclass(frozen=True)
class Loaded:
    """Where training goes on."""

    uri: str
    digest: str
    manifest: CheckpointManifest
    history: list[dict[str, Any]]


def choose(paths: RunPaths, world: World, identity: dict[str, Any]) -> Loaded | None:
    """The newest committed checkpoint of the run that verifies; None if none was ever committed. Collective.

    Raises CheckpointError if the newest belongs to another training, or if every committed checkpoint is damaged.
    """
    names: list[CheckpointName] = world.from_main(commit.committed(paths) if world.is_main else None)
    for name in names:
        uri = storage.join(paths.checkpoints, str(name))
        problems = world.gather(_problem(uri, identity, world))
        problem = next((p for p in problems if p), None)
        if problem is None:
            manifest, digest = commit.read_manifest(uri)
            return Loaded(uri, digest, manifest, storage.read_json(storage.join(uri, commit.HISTORY)))
        error = error_from_dict(problem)
        if "another training" in error.what:
            raise error
        if world.is_main:
            print(f"warning: {error.line}; going back to the checkpoint before", file=sys.stderr, flush=True)
            storage.remove(storage.join(uri, commit.COMMITTED))
    if names:
        raise CheckpointError(
            f"all {len(names)} committed checkpoints are damaged", where=paths.checkpoints, fix="start a new run"
        )
    return None


def load_into(state: State, uri: str) -> None:
    """Fills the tensors of `state` in place from the checkpoint, resharding as needed.

    Collective. Raises CheckpointError.
    """
    try:
        dcp.state_dict_loader.load(state, storage_reader=reader(uri))
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"cannot be loaded: {str(cause).splitlines()[0]}", where=uri) from error


def reader(uri: str) -> Any:
    """A DCP reader of a checkpoint folder."""
    if storage.is_local(uri):
        return dcp.filesystem.FileSystemReader(storage.local_path(uri))
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return FsspecReader(uri)


def _problem(uri: str, identity: dict[str, Any], world: World) -> dict[str, Any] | None:
    """Why this process cannot accept the checkpoint, as plain data; None if it can."""
    try:
        manifest, _ = commit.read_manifest(uri)
        commit.require_same_training(manifest, identity, uri)
        commit.verify_files(uri, manifest.files, (world.rank, world.size))
    except KftrainError as error:
        return error.to_dict()
    return None
