"""Saving: every process writes its share in parallel, rank 0 commits.

`save` copies the state to host memory (the only part that training waits for), then a background thread writes the
files with torch.distributed.checkpoint, which are hashed on the way, gathers all processes' digests on rank 0 and
commits. One save is in flight at a time. All collectives of the thread use the world's background group, in the same
order on every process.
"""

from __future__ import annotations

import contextvars
import errno
import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from kftrain.checkpoint.files import CheckpointFiles
from kftrain.checkpoint.staging import Staging, State
from kftrain.core import storage, threads
from kftrain.core.progress import to_log
from kftrain.errors import (
    BUG_CODE,
    KftrainError,
    RetryableError,
    StorageError,
    error_from_dict,
    error_to_dict,
    print_traceback,
)
from kftrain.parallel.world import World
from kftrain.run import attempts, commit
from kftrain.run.commit import CheckpointManifest, CheckpointName, FileEntry
from kftrain.run.paths import RunPaths
from kftrain.run.selection import BestEvaluation

METADATA = ".metadata"
"""Name of the file that DCP writes last."""

Problem = dict[str, Any]
"""An error as plain data."""

Files = dict[str, FileEntry]


@dataclass(frozen=True)
class Identity:
    """The fields that all checkpoints of an attempt have in common."""

    attempt: int
    dataset_digest: str
    training_digest: str
    training_identity: dict[str, Any]
    parts: dict[str, int] = field(default_factory=lambda: dict(commit.PARTS_BEFORE))
    """Names of the parts of the state, and the versions of their forms."""
    batch_norm_samples: int | None = None
    """See `CheckpointManifest`."""


@dataclass(frozen=True)
class _Flight:
    """A save that was begun and not yet waited for."""

    step: int
    start: float
    """On the monotonic clock."""
    future: Future[int]


class CheckpointWriter:
    """Writes the checkpoints of one attempt.

    All methods are collective: call them on every process, in the same order.
    """

    def __init__(
        self,
        paths: RunPaths,
        world: World,
        identity: Identity,
        keep_last: int,
        committed_step: int,
        timeout_seconds: float = math.inf,
        sound_so_far: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> None:
        """Prepare for the attempt's saves; nothing is written yet.

        `sound_so_far` is called when a save begins. What it returns is called by every process before the commit, and
        raises, perhaps after a while, where nothing may be made of the data read by then.
        """
        self._paths = paths
        self._world = world
        self._identity = identity
        self._keep_last = keep_last
        self._timeout_seconds = timeout_seconds
        self._sound_so_far = sound_so_far
        self._staging = Staging()
        self._flight: _Flight | None = None
        self.committed_step = committed_step
        """Step of the newest committed checkpoint; at first the one that the attempt began with."""
        self.bad_samples: Collection[int] = ()
        """Numbers of the samples that were left out so far: the counter's own set, which grows."""
        self.keep_every = 0
        """Checkpoints at multiples of this step are kept for good; 0: none."""
        self.selected: Callable[[], BestEvaluation | None] = lambda: None
        """Returns the best evaluation so far, whose checkpoint is kept."""
        self.write_tables: Callable[[str, CheckpointName, World], Files] = lambda uri, name, world: {}
        """Has servers write their tables beside the checkpoint, and returns their files on the first process."""

    @property
    def step(self) -> int | None:
        """Step of the save in flight, finished or not, until it is waited for; None where there is none."""
        return None if self._flight is None else self._flight.step

    @property
    def busy(self) -> bool:
        """True while this process's thread is writing. Processes may differ: agree before acting on it."""
        return self._flight is not None and not self._flight.future.done()

    @property
    def overdue(self) -> bool:
        """True where the save in flight takes longer than it may, on this process."""
        return self.busy and self._left_seconds() <= 0

    def save(self, state: State, history: list[dict[str, Any]], step: int, samples_consumed: int) -> None:
        """Start a save; return when the state has been copied, and may be changed again.

        The save before must have been waited for.
        """
        # All that training goes on to change is copied here, before the thread starts: the state, the history, and in
        # the manifest the samples left out and the best evaluation. One save at a time: the staging memory is the
        # thread's until then, and its collectives would mix with those of a second one.
        assert self._flight is None, self._flight
        name = CheckpointName(step, self._identity.attempt)
        staged = self._staging.copy_of(state)
        manifest = self._build_manifest(name, samples_consumed)
        start, rows = time.monotonic(), list(history)
        context = contextvars.copy_context()  # how long the caller waits for storage
        sound = self._sound_so_far()
        # At once and not in the thread: the next step changes the tables.
        tables = self.write_tables(storage.join(self._paths.checkpoints, str(name)), name, self._world)
        future = threads.start(
            lambda: context.run(self._write, staged, rows, name, manifest, sound, tables), "checkpoint"
        )
        self._flight = _Flight(step, start, future)

    def wait(self) -> None:
        """Wait until the save in flight is committed.

        Raises what it failed with, on all processes the same: FencedError, or RetryableError, after which nothing of
        it is left and another one may be begun; anything else is a bug. Raises RetryableError, too, where it is
        overdue: then it still is in flight.
        """
        if self._flight is None:
            return
        self.close()
        if self.busy:
            raise self.overdue_error()
        flight = self._flight
        self._flight = None  # before the result, which may raise: a failed save has ended, and another may follow
        self.committed_step = flight.future.result()

    def overdue_error(self) -> StorageError:
        """Build the error to raise where the save in flight is overdue."""
        assert self._flight is not None
        return StorageError(
            f"the checkpoint at step {self._flight.step} was not written within {self._timeout_seconds:g} s",
            where=self._paths.checkpoints,
            fix="see that the storage answers, or raise checkpoint.timeout_seconds",
        )

    def close(self) -> None:
        """Let a save in flight finish, for as long as it may take."""
        if self._flight is not None:
            futures.wait([self._flight.future], timeout=min(max(0.0, self._left_seconds()), threading.TIMEOUT_MAX))

    def _left_seconds(self) -> float:
        assert self._flight is not None
        return self._flight.start + self._timeout_seconds - time.monotonic()

    def _build_manifest(self, name: CheckpointName, samples_consumed: int) -> CheckpointManifest:
        return CheckpointManifest(
            step=name.step,
            samples_consumed=samples_consumed,
            attempt=name.attempt,
            world_size=self._world.size,
            dataset_digest=self._identity.dataset_digest,
            training_digest=self._identity.training_digest,
            training_identity=self._identity.training_identity,
            files={},
            parts=self._identity.parts,
            bad_samples=tuple(sorted(self.bad_samples)),
            selection=self.selected(),
            batch_norm_samples=self._identity.batch_norm_samples,
        )

    def _write(
        self,
        staged: State,
        history: list[dict[str, Any]],
        name: CheckpointName,
        manifest: CheckpointManifest,
        sound: Callable[[], None],
        tables: Files,
    ) -> int:
        """Write the files and commit them; return the step. Runs in the thread."""
        # Every process takes the same branches: each collective ends with the same problem, or none, on all of them.
        # An error that one process raised on its own in between would leave the others waiting for it.
        uri = storage.join(self._paths.checkpoints, str(name))
        written, problem = self._write_files(staged, uri)
        if problem is None:  # all files are durable; now all digests come together, and whether the data was sound
            gathered: list[Any] = [None] * self._world.size
            written = {**written, **tables}
            dist.all_gather_object(gathered, (written, _run_check(sound)), group=self._world.background)
            problem = next((objection for _, objection in gathered if objection), None)
        if problem is None:  # rank 0 alone writes the marker, and the others wait for its word
            entries = {key: entry for part, _ in gathered for key, entry in part.items()}
            outcome = [self._try_to_commit(name, manifest, history, entries) if self._world.is_main else None]
            dist.broadcast_object_list(outcome, src=0, group=self._world.background)
            problem = outcome[0]
        if problem is None:
            return name.step
        error = error_from_dict(problem)
        assert error.exit_code != BUG_CODE, error.line
        if self._world.is_main and error.retryable:
            _remove(uri)  # all processes have ended writing to it
        raise error

    def _write_files(self, staged: State, uri: str) -> tuple[dict[str, FileEntry], Problem | None]:
        """Write this process's share; return what it wrote, or on all processes the same problem."""
        # DCP gathers the errors of all processes and raises them on each: so all return a problem, or none does.
        writer = _Writer(uri)
        try:
            dcp.state_dict_saver.save(staged, storage_writer=writer, process_group=self._world.background)
        except CheckpointException as error:  # a BaseException
            causes = [cause for cause, _ in error.failures.values()]
            return {}, _describe_failure(causes[0] if causes else error, uri, "written")
        return writer.files.entries, None

    def _try_to_commit(
        self,
        name: CheckpointName,
        manifest: CheckpointManifest,
        history: list[dict[str, Any]],
        files: dict[str, FileEntry],
    ) -> Problem | None:
        """Commit, and tidy up; return what went wrong. On rank 0."""
        # The run must still be this attempt's: a successor may have claimed it while the files were written. The marker
        # comes last, with the digests of all files: whoever sees it finds them whole.
        uri = storage.join(self._paths.checkpoints, str(name))
        try:
            with storage.simplify_errors(uri, "the checkpoint could not be committed"):
                attempts.require_held(self._paths, name.attempt)
                content = storage.dump_json(history)
                storage.publish(storage.join(uri, commit.HISTORY), content)
                files = {**files, commit.HISTORY: commit.make_entry(content)}
                commit.commit(self._paths, name, manifest.model_copy(update={"files": files}))
            self._tidy_up(name, history, manifest.selection)
        except Exception as error:  # noqa: BLE001 - the others wait for this answer, whatever went wrong
            return _describe_failure(error, uri, "committed")
        return None

    def _tidy_up(self, name: CheckpointName, history: list[dict[str, Any]], selection: BestEvaluation | None) -> None:
        """Retire old checkpoints and publish the history. A failure is told only: the next commit does it again."""
        try:
            with storage.simplify_errors(self._paths.uri):
                best_step = selection.step if selection else 0
                # First: it makes room.
                commit.retire_checkpoints(self._paths, self._keep_last, name.attempt, best_step, self.keep_every)
                storage.publish_json(self._paths.history, history)
        except (OSError, RetryableError) as error:
            to_log(f"warning: after the commit of step {name.step}: {_in_words(error)}")


class _Writer(dcp.filesystem.FileSystemWriter):
    """DCP's writer, over our files; it writes what is on the CPU already."""

    fs: Any

    def __init__(self, uri: str) -> None:
        super().__init__(uri, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self.files = CheckpointFiles()
        self.fs = self.files
        self.path = uri

    def prepare_local_plan(self, plan: Any) -> Any:
        """Refuse to write over a checkpoint, as DCP does, but by an error of storage."""
        if self.files.exists(self.files.concat_path(self.path, METADATA)):
            raise FileExistsError(errno.EEXIST, "there is one already", self.path)
        return super().prepare_local_plan(plan)


def _run_check(check: Callable[[], None]) -> Problem | None:
    try:
        check()
    except KftrainError as error:
        return error.to_dict()
    return None


def _describe_failure(error: BaseException, uri: str, what: str) -> Problem:
    """Describe why a save failed, as plain data for all processes to raise."""
    if isinstance(error, KftrainError):
        return error.to_dict()
    if isinstance(error, OSError):
        fix = "free some space" if storage.is_full(error) else ""
        return StorageError(f"the checkpoint could not be {what}: {_in_words(error)}", where=uri, fix=fix).to_dict()
    print_traceback(error)  # a bug: the other processes only get its last frame
    return error_to_dict(error)


def _in_words(error: BaseException) -> str:
    """Put an error in words, without its path, which the message names already."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def _remove(uri: str) -> None:
    """Delete what a failed save has left, unless it is a whole checkpoint all the same.

    The marker may have been written although its answer was an error.
    """
    try:
        with storage.simplify_errors(uri):
            if not storage.exists(storage.join(uri, commit.COMMITTED)):
                storage.remove(uri)
    except (OSError, RetryableError) as error:
        to_log(f"warning: {uri} could not be deleted: {_in_words(error)}")
