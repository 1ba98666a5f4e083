"""Loading: the newest committed checkpoint that verifies, on any number of processes.

Every process verifies its share of the files before any of them is unpickled or read; all agree on the outcome. If a
checkpoint is damaged, the one before it is tried; once one is found, those that were passed over lose their markers.
Where all are damaged, none is touched. Only a run that never committed anything starts from scratch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from kftrain.checkpoint import reader
from kftrain.checkpoint.staging import State
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.errors import (
    CheckpointError,
    KftrainError,
    OtherTrainingError,
    RetryableError,
    StorageError,
    error_from_dict,
)
from kftrain.parallel.world import World
from kftrain.run import attempts, commit, documents
from kftrain.run.attempts import Claim
from kftrain.run.commit import CheckpointManifest, CheckpointName, FileEntry
from kftrain.run.paths import RunPaths


@dataclass(frozen=True)
class Loaded:
    """The checkpoint from which training goes on."""

    uri: str
    digest: str
    manifest: CheckpointManifest
    history: list[dict[str, Any]]


def choose_checkpoint(paths: RunPaths, world: World, identity: dict[str, Any]) -> Loaded | None:
    """Choose the newest committed checkpoint of the run that verifies; None if none was ever committed.

    Collective. Call it only with the run claimed: checkpoints that are passed over lose their markers. Raises
    CheckpointError if one belongs to another training, if every committed checkpoint is damaged, or if all that were
    committed are gone.
    """
    # Rank 0 names each candidate: listings that each process made for itself could differ while somebody writes.
    damaged: list[str] = []
    while uri := world.from_main(_find_newest(paths, damaged) if world.is_main else None):
        problem = next(filter(None, world.gather_slowly(_find_problem(uri, identity, world))), None)
        if problem is None:
            # Read by each process for itself: all have just verified that these are the bytes of one commit.
            manifest, digest = commit.read_checkpoint_manifest(uri)
            history = storage.read_json(storage.join(uri, commit.HISTORY))
            if world.is_main:  # only now that another one is sound: if all are damaged, all are left as they are
                _remove_markers(damaged)
            if not world.from_main(_has_best(paths, manifest) if world.is_main else None):
                manifest = manifest.model_copy(update={"selection": None})
            return Loaded(uri, digest, manifest, history)
        error = error_from_dict(problem)
        if error.retryable or isinstance(error, OtherTrainingError):  # storage that is away damages nothing
            raise error
        # The attempt before may retire a checkpoint while it is read: that one is gone, not damaged.
        if world.from_main(storage.exists(storage.join(uri, commit.COMMITTED)) if world.is_main else None):
            damaged.append(uri)
            if world.is_main:
                print(f"warning: {error.line}; going back to the checkpoint before", file=sys.stderr, flush=True)
    if damaged:
        raise CheckpointError(
            f"all {len(damaged)} committed checkpoints are damaged", where=paths.checkpoints, fix="start a new run"
        )
    _raise_on_all(world, _find_lost(paths) if world.is_main else None)
    return None


def refuse_another_training(paths: RunPaths, world: World, identity: dict[str, Any]) -> None:
    """Raises CheckpointError if the newest committed checkpoint belongs to another training.

    Collective, and cheap: it reads one manifest, so that a job with other settings is refused before it claims the run.
    """
    _raise_on_all(world, _find_foreign(paths, identity) if world.is_main else None)


def load_into(state: State, uri: str, files: Mapping[str, FileEntry]) -> None:
    """Fill the tensors of `state` in place from the checkpoint, resharding as needed.

    `files`: of its manifest; no other is read. Collective. Raises CheckpointError, and RetryableError where storage is
    away: that says nothing about the checkpoint.
    """
    try:
        reader.fill_state(state, uri, files)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        away = next((cause for cause in causes if isinstance(cause, RetryableError) or storage.is_outage(cause)), None)
        if away is not None:
            raise StorageError(f"the checkpoint could not be read: {away}", where=uri) from error
        cause = causes[0]
        raise CheckpointError(f"cannot be loaded: {str(cause).splitlines()[0]}", where=uri) from error


def _find_newest(paths: RunPaths, damaged: list[str]) -> str | None:
    """Return the URI of the newest committed checkpoint that is not known to be damaged; None if there is none."""
    uris = (storage.join(paths.checkpoints, str(name)) for name in commit.list_committed(paths))
    return next((uri for uri in uris if uri not in damaged), None)


def _has_best(paths: RunPaths, manifest: CheckpointManifest) -> bool:
    """Tell whether the best checkpoint that a manifest names is there; warn where it is gone.

    A later best one took its place, and is now damaged.
    """
    best = manifest.selection
    if best is None or best.value is None or any(name.step == best.step for name in commit.list_committed(paths)):
        return True
    to_log(f"warning: the best checkpoint, of step {best.step}, is gone: what is evaluated from here on counts")
    return False


def _remove_markers(damaged: list[str]) -> None:
    """Take the markers of damaged checkpoints away: what is trained anew from here on must be the newest."""
    for uri in damaged:
        storage.remove(storage.join(uri, commit.COMMITTED))


def _raise_on_all(world: World, problem: dict[str, Any] | None) -> None:
    """Raise on all processes the problem that rank 0 has, if any. Collective."""
    agreed = world.from_main(problem)
    if agreed:
        raise error_from_dict(agreed)


def _find_foreign(paths: RunPaths, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Say why this training may not go on with the newest checkpoint, as plain data; None if it may."""
    uri = _find_newest(paths, [])
    if uri is None:
        return None
    try:
        manifest, _ = commit.read_checkpoint_manifest(uri)
    except CheckpointError:  # damaged, or retired this moment: `choose` deals with both
        return None
    try:
        commit.require_same_training(manifest, identity, uri)
    except CheckpointError as error:
        return error.to_dict()
    return None


def _find_lost(paths: RunPaths) -> dict[str, Any] | None:
    """Say why a run without a committed checkpoint may not start from scratch, as plain data; None if it may.

    Who deletes the folder of checkpoints as a whole wants it to start from scratch.
    """
    if not any(CheckpointName.parse(name) for name in storage.list_names(paths.checkpoints)):
        return None
    numbers = range(1, attempts.find_last_attempt(paths) + 1)
    step = max((documents.read(Claim, paths.attempt(number)).start_step for number in numbers), default=0)
    if step == 0:
        return None
    return CheckpointError(
        f"the committed checkpoints of this run are gone: an attempt went on after step {step}",
        where=paths.checkpoints,
        fix="start a new run, or delete this folder to train from the first step",
    ).to_dict()


def _find_problem(uri: str, identity: dict[str, Any], world: World) -> dict[str, Any] | None:
    """Say why this process cannot accept the checkpoint, as plain data; None if it can. Verifies its share of files."""
    try:
        manifest, _ = commit.read_checkpoint_manifest(uri)
        commit.require_same_training(manifest, identity, uri)
        commit.verify_files(uri, manifest.files, (world.rank, world.size))
    except KftrainError as error:
        return error.to_dict()
    return None
