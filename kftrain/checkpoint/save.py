"""Saving: every process writes its share in parallel, rank 0 commits.

`save` copies the state to host memory (the only part that training waits for), then a background thread writes the
files with torch.distributed.checkpoint, hashes them, gathers all processes' digests on rank 0 and commits. One save is
in flight at a time. All collectives of the thread use the world's background group, in the same order on every process.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from kftrain import attempts, storage
from kftrain.checkpoint import commit
from kftrain.checkpoint.commit import CheckpointManifest, CheckpointName, FileEntry
from kftrain.contracts import RunPaths
from kftrain.errors import BUG_CODE, KftrainError, RetryableError, error_from_dict, error_to_dict
from kftrain.parallel.world import World

State = dict[str, Any]

T = TypeVar("T")

_DRIVERS = ("botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "fsspec")
"""Packages whose exceptions say that an object store refused or cannot be reached."""


@dataclass(frozen=True)
class Identity:
    """What every checkpoint of an attempt has in common."""

    attempt: int
    dataset_digest: str
    training_digest: str
    training_identity: dict[str, Any]


class CheckpointWriter:
    """Writes the checkpoints of one attempt.

    All methods are collective: call them on every process, in the same order.
    """

    def __init__(self, paths: RunPaths, world: World, identity: Identity, keep_last: int, committed_step: int) -> None:
        self._paths, self._world, self._identity, self._keep_last = paths, world, identity, keep_last
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[int] | None = None
        self.committed_step = committed_step
        """Step of the newest committed checkpoint; at first the one that the attempt began with."""

    @property
    def busy(self) -> bool:
        """Whether this process's thread is still writing. Processes may differ: agree before acting on it."""
        return self._pending is not None and not self._pending.done()

    def save(self, state: State, history: list[dict[str, Any]], step: int, samples_consumed: int) -> None:
        """Starts a save; returns when the state has been copied, and may be changed again.

        Raises what an earlier save in the background failed with, on all processes the same: FencedError or
        RetryableError; anything else is a bug.
        """
        self.wait()
        name = CheckpointName(step, self._identity.attempt)
        writer = _writer(storage.join(self._paths.checkpoints, str(name)))
        staged = writer.stage(state)
        manifest = self._manifest(name, samples_consumed)
        self._pending = self._thread.submit(self._write, writer, staged, list(history), name, manifest)

    def wait(self) -> None:
        """Returns when the save in flight is committed. Raises FencedError or RetryableError if it was not."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self.committed_step = pending.result()

    def close(self) -> None:
        """Ends the thread; a save in flight is finished first."""
        self._thread.shutdown(wait=True)

    def _manifest(self, name: CheckpointName, samples_consumed: int) -> CheckpointManifest:
        return CheckpointManifest(
            step=name.step,
            samples_consumed=samples_consumed,
            attempt=name.attempt,
            world_size=self._world.size,
            dataset_digest=self._identity.dataset_digest,
            training_digest=self._identity.training_digest,
            training_identity=self._identity.training_identity,
            files={},
        )

    def _write(
        self,
        writer: Any,
        staged: State,
        history: list[dict[str, Any]],
        name: CheckpointName,
        manifest: CheckpointManifest,
    ) -> int:
        uri = storage.join(self._paths.checkpoints, str(name))
        try:
            dcp.state_dict_saver.save(staged, storage_writer=writer, process_group=self._world.background)
        except (CheckpointException, OSError) as error:  # CheckpointException is a BaseException
            raise RetryableError(f"the checkpoint could not be written: {_first_line(error)}", where=uri) from error
        gathered: list[Any] = [None] * self._world.size
        dist.all_gather_object(gathered, _tried(uri, self._hash_own_files, uri), group=self._world.background)
        _raise_first(problem for _, problem in gathered)
        outcome: list[Any] = [None]
        if self._world.is_main:
            entries = {key: entry for part, _ in gathered for key, entry in part.items()}
            outcome = [_tried(uri, self._commit, uri, name, manifest, history, entries)[1]]
        dist.broadcast_object_list(outcome, src=0, group=self._world.background)
        _raise_first(outcome)
        return name.step

    def _hash_own_files(self, uri: str) -> dict[str, FileEntry]:
        prefix = f"__{self._world.rank}_"
        names = [name for name in storage.list_names(uri) if name.startswith(prefix)]
        if self._world.is_main:
            names.append(".metadata")
        return {name: commit.entry_of(storage.join(uri, name)) for name in names}

    def _commit(
        self,
        uri: str,
        name: CheckpointName,
        manifest: CheckpointManifest,
        history: list[dict[str, Any]],
        files: dict[str, FileEntry],
    ) -> None:
        attempts.require_held(self._paths, name.attempt)
        history_uri = storage.join(uri, commit.HISTORY)
        storage.publish_json(history_uri, history)
        files = {**files, commit.HISTORY: commit.entry_of(history_uri)}
        commit.commit(self._paths, name, manifest.model_copy(update={"files": files}))
        storage.publish_json(self._paths.history, history)
        commit.retire(self._paths, self._keep_last, name.attempt)


def _tried(uri: str, work: Callable[..., T], *arguments: Any) -> tuple[T | None, dict[str, Any] | None]:
    """What the work returns, or why it failed as plain data, for all processes to raise."""
    try:
        return work(*arguments), None
    except Exception as error:  # noqa: BLE001 - the others wait for this answer, whatever went wrong
        if isinstance(error, KftrainError):
            return None, error.to_dict()
        if isinstance(error, OSError) or _is_of_a_driver(error):
            cause = f"{type(error).__name__}: {_first_line(error)}"
            return None, RetryableError(f"the checkpoint could not be committed: {cause}", where=uri).to_dict()
        traceback.print_exception(error, file=sys.stderr)  # a bug: the other processes only get its last frame
        return None, error_to_dict(error)


def _is_of_a_driver(error: Exception) -> bool:
    """Whether an object store's driver raised it: most of their exceptions are no OSErrors."""
    return any(kind.__module__.split(".")[0] in _DRIVERS for kind in type(error).__mro__)


def _raise_first(problems: Iterable[dict[str, Any] | None]) -> None:
    """Raises the first of the problems, a bug as an AssertionError; does nothing where there are none."""
    first = next(filter(None, problems), None)
    if first is not None:
        assert first["exit_code"] != BUG_CODE, first["line"]
        raise error_from_dict(first)


def _writer(uri: str) -> Any:
    """A DCP writer that is also a stager: `stage` copies the state to the CPU."""
    if storage.is_local(uri):
        return dcp.filesystem.FileSystemWriter(storage.local_path(uri), overwrite=False)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(uri, overwrite=False)


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        error = causes[0] if causes else error
    return (str(error).strip() or type(error).__name__).splitlines()[0]
