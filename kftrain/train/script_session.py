"""Runs a script for torchrun in the place of our training loop (`train.command`), on each rank of one attempt.

The attempt is claimed and the checkpoint chosen as for ours, then the script runs in this very process, as `__main__`.
Ranks talk by the store where they meet: the script decides which process groups there are, if any. The store is rank
0's, and torch is told to use it, as under torchrun.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kftrain.checkpoint import export_tensors, exporting, folders, load
from kftrain.checkpoint.filling import ModelSlots
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.core.progress import to_log
from kftrain.data.shards.verify import verify_shards
from kftrain.errors import (
    FIRST_RETRYABLE_CODE,
    CheckpointError,
    ConfigError,
    KftrainError,
    LaunchError,
    Preempted,
    RetryableError,
    StorageError,
    UserCodeError,
    error_from_dict,
)
from kftrain.launch.spec import ERROR_FILE_ENV
from kftrain.models import build_model
from kftrain.parallel.initialize import construct_empty
from kftrain.parallel.world import SLOW_SECONDS, World, meet_others
from kftrain.process.liveness import Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.run import attempts, commit
from kftrain.run.commit import CheckpointManifest, CheckpointName, FileEntry
from kftrain.run.export import ExportManifest
from kftrain.run.paths import RunPaths
from kftrain.run.script import WHERE, Script
from kftrain.tracking.base import Tracker
from kftrain.train import completing
from kftrain.train.completing import Finished
from kftrain.train.reading import Training
from kftrain.train.recorder import Recorder
from kftrain.worker.error_report import classify

OpenTracker = Callable[[RunPaths, Config, Path], Tracker | None]

SLOW = timedelta(seconds=SLOW_SECONDS)

END_SECONDS = 5.0
"""Seconds that rank 0 waits for the others at the end of a script that was asked to stop."""


class ScriptSession:
    """One rank of an attempt: answers the script's calls of `report`, `commit`, `complete` and `should_stop`."""

    def __init__(self, training: Training, stop: StopRequest, store: Any, folder: Path) -> None:
        """Prepare the rank; nothing is claimed yet. `folder`: of the attempt on this node, all its ranks share it."""
        self.training = training
        self.stop = stop
        self.rank, self.size, self.local_rank, self.node, self.local_size = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")
        )
        self._store = store
        self._folder = folder
        self._start = time.monotonic()
        self._liveness = Liveness(lambda: None, training.config.launch.timeout_seconds, counts_always=True)
        self._watch = self._liveness.mark_watched()
        self._is_watched = False
        self._num_commits = 0
        self._group: Any = None
        self.recorder: Recorder | None = None
        self.attempt = 0
        self.last_step = 0
        """Step that was reported last; at first the one that the attempt goes on after."""
        self.committed_step = 0
        self.is_complete = False

    def begin(self) -> str:
        """Claim the attempt, fetch its checkpoint; return the folder to resume from, empty for none. Collective."""
        if self.rank == 0:
            self._tell("begin", self._claim)
        begun = self._ask("begin")
        self.attempt, self.last_step = begun["attempt"], begun["step"]
        self.committed_step = self.last_step
        resume = self._folder / "resume"
        if self.local_rank == 0:
            (self._folder / "checkpoints").mkdir()
            self._tell(f"fetched/{self.node}", lambda: self._fetch(begun["uri"], resume))
        self._ask(f"fetched/{self.node}")
        return str(resume) if begun["uri"] else ""

    def _claim(self) -> dict[str, Any]:
        paths, alone = self.training.paths, _Alone.build()
        load.refuse_another_training(paths, alone, self.training.identity)
        storage.remove(paths.error)  # the error of the attempt before is no longer the run's
        attempt = attempts.claim_run(paths, commit.find_last_step(paths), self.size)
        loaded = load.choose_checkpoint(paths, alone, self.training.identity)
        step = loaded.manifest.step if loaded else 0
        self.recorder = Recorder(loaded.history if loaded else [], None, self.training.config.train.steps)
        to_log(f"attempt {attempt}: {WHERE}, {self.size} processes" + (f", going on after step {step}" if step else ""))
        return {"attempt": attempt, "step": step, "uri": loaded.uri if loaded else ""}

    def _fetch(self, uri: str, resume: Path) -> None:
        if uri:
            folders.fetch_folder(uri, commit.read_checkpoint_manifest(uri)[0].files, resume)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `kftrain.api.report`."""
        if step <= self.last_step:
            raise ConfigError("steps must grow", where="kftrain.report", value=step, fix="report each step once")
        if not self._is_watched:
            self._is_watched = True
            self._watch.__enter__()
        self._liveness.note_progress()
        before, self.last_step = self.last_step, step
        if self.recorder is not None:
            values = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
            num_samples = (step - before) * self.training.config.train.global_batch_size
            self.recorder.record(step, values, step - before, num_samples)

    def should_stop(self) -> bool:
        """See `kftrain.api.should_stop`."""
        self._liveness.note_progress()
        return bool(self._find_greatest(int(self.stop.requested)))

    def _find_greatest(self, value: int) -> int:
        """Return the greatest value of all ranks; this one's own where the script has made no process group."""
        if self.size == 1 or not dist.is_initialized():
            return value
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        greatest = torch.tensor([value])
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=self._group)
        return int(greatest.item())

    def commit(self, folder: Path, step: int | None) -> None:
        """See `kftrain.api.commit`."""
        self._find_greatest(0)  # where a rank is gone, this ends at once; the store would wait for it
        self._num_commits += 1
        key = f"commit/{self._num_commits}"
        if self.rank == 0:
            self._tell(f"{key}/step", lambda: self._require_new(self.last_step if step is None else step))
        if self._store.add(f"{key}/arrived", 1) == self.size:
            self._tell(f"{key}/all", lambda: None)
        # Until all have come each is watched, so that one which never comes is named. Then every file is written, and
        # copying may take as long as it takes.
        self._ask(f"{key}/all")
        with self._liveness.mark_resting():
            name = CheckpointName(self._ask(f"{key}/step"), self.attempt)
            uri = storage.join(self.training.paths.checkpoints, str(name))
            if self.local_rank == 0:
                self._tell(f"{key}/node/{self.node}", lambda: _store_node(folder, uri))
            if self.rank == 0:
                self._tell(f"{key}/outcome", lambda: self._publish(key, name, uri))
            self._ask(f"{key}/outcome")
        self.committed_step = name.step
        self.last_step = max(self.last_step, name.step)

    def _require_new(self, step: int) -> int:
        if step <= self.committed_step:
            fix = "report the next step first, or give commit its step"
            raise ConfigError("this step is committed already", where="kftrain.commit", value=step, fix=fix)
        return step

    def _publish(self, key: str, name: CheckpointName, uri: str) -> None:
        """Commit what all nodes have copied; on rank 0."""
        files: dict[str, FileEntry] = {}
        for node in range(self.size // self.local_size):
            for file, fields in self._ask(f"{key}/node/{node}").items():
                entry = FileEntry.model_validate(fields)
                if files.setdefault(file, entry) != entry:
                    what = "two nodes have written different files of the same name"
                    raise CheckpointError(what, where="kftrain.commit", value="/".join(folders.decode_name(file)))
        training, history = self.training, storage.dump_json(self._history)
        storage.publish(storage.join(uri, commit.HISTORY), history)
        manifest = CheckpointManifest(
            step=name.step,
            samples_consumed=name.step * training.config.train.global_batch_size,
            attempt=self.attempt,
            world_size=self.size,
            dataset_digest=training.manifest.dataset_digest,
            training_digest=training.digest,
            training_identity=training.identity,
            files={**files, commit.HISTORY: commit.make_entry(history)},
            parts={"script": 1},
        )
        commit.commit(training.paths, name, manifest)
        saving = training.config.checkpoint
        commit.retire_checkpoints(training.paths, saving.keep_last, self.attempt, keep_every=saving.keep_every)
        storage.publish(training.paths.history, history)

    @property
    def _history(self) -> list[dict[str, Any]]:
        return self.recorder.history if self.recorder else []

    def complete(self, export: Path) -> None:
        """See `kftrain.api.complete`."""
        if self.rank != 0:
            return
        if not self.committed_step or self.last_step > self.committed_step:
            what = f"step {self.last_step} is not committed"
            raise CheckpointError(what, where="kftrain.complete", fix="call kftrain.commit(folder) after the last step")
        with self._liveness.mark_resting():
            paths = self.training.paths
            name = CheckpointName(self.committed_step, self.attempt)
            known = [name for name in commit.list_committed(paths) if name.step == self.committed_step]
            uri = storage.join(paths.checkpoints, str(known[0] if known else name))
            attempts.require_held(paths, self.attempt)
            finished, written = self._export(uri, export)
            completing.publish_completion(self.training, finished, time.monotonic() - self._start, uri, written)
        self.is_complete = True

    def _export(self, uri: str, folder: Path) -> tuple[Finished, tuple[str, str]]:
        """Export the script's tensors as the model of the configuration. Raises CheckpointError where they are not."""
        training, config = self.training, self.training.config
        arguments = completing.ask_model_arguments(training.task)
        model = construct_empty(lambda: build_model(config.model, arguments))
        description = completing.describe_export(model, config, training.task, arguments)
        files = require_tensors(folder, model, config.model.kind)

        def copy(target: str) -> dict[str, FileEntry]:
            for name in files:
                with (folder / name).open("rb") as source, storage.open_write(storage.join(target, name)) as stream:
                    while content := source.read(exporting.COPY_BYTES):
                        stream.write(content)
            return files

        written = exporting.export_checkpoint(
            training.paths, uri, description.description, description.model_config, description.task_files, copy
        )
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        history, step = self._history, self.committed_step
        return Finished(self.attempt, self.size, num_parameters, history, description, step, None), written

    def end(self) -> None:
        """Wait for the other ranks, which use the store of rank 0, then judge what the script has done.

        Raises Preempted, or LaunchError for a script that ends without `complete`.
        """
        self._store.add("ended", 1)
        if self.rank != 0:
            return
        was_asked, start = self.stop.requested, time.monotonic()
        patience_seconds = END_SECONDS if was_asked else self.training.config.launch.timeout_seconds
        while self._store.add("ended", 0) < self.size and time.monotonic() - start < patience_seconds:
            if self.stop.requested and not was_asked:  # another rank has failed, or the job is stopped
                break
            time.sleep(0.02)
        if self.is_complete:
            return
        if self.stop.requested:
            raise Preempted(f"the script stopped when it was asked to; step {self.committed_step} is committed")
        raise LaunchError(
            "the script has ended without kftrain.complete(), so nothing says that the training is done",
            where=WHERE,
            value=" ".join(self.training.config.train.command),
            fix="call kftrain.complete(export) after the last commit",
        )

    def close(self) -> None:
        """End the beats and the script's process groups: a process that exits with gloo alive dies of SIGABRT."""
        self._liveness.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _tell(self, key: str, work: Callable[[], Any]) -> None:
        """Do work and put its result, or its error, where the other ranks `_ask` for it."""
        answer: dict[str, Any] = {}
        try:
            answer["result"] = work()
        except (KftrainError, OSError) as error:
            known = classify(error) or StorageError(f"{type(error).__name__}: {error}", where=WHERE)
            answer["problem"] = known.to_dict()
        self._store.set(f"kftrain/{key}", json.dumps(answer))

    def _ask(self, key: str) -> Any:
        """Wait for what another rank tells; raise its error if it has one."""
        self._store.wait([f"kftrain/{key}"], SLOW)
        answer = json.loads(self._store.get(f"kftrain/{key}"))
        if "problem" in answer:
            raise error_from_dict(answer["problem"])
        return answer["result"]


current: ScriptSession | None = None
"""The session of this process, while the script runs."""


def run_script(training: Training, stop: StopRequest, open_tracker: OpenTracker) -> None:
    """Run the script of `train.command` on this rank to its end; return where it has completed the training.

    Raises Preempted after a stop, LaunchError without `complete`, UserCodeError for what the script raises.
    """
    global current
    config, paths = training.config, training.paths
    script = Script.parse(config.train.command)
    script.require_digest(config.train.command_digest)
    if config.data.verify == "everything":
        place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        verify_shards(training.manifest_uri, training.manifest, place)
    folder = Path(os.environ[ERROR_FILE_ENV]).parent  # the supervisor's, which deletes it however the ranks end
    store = meet_others(timedelta(seconds=config.launch.timeout_seconds))
    session = ScriptSession(training, stop, store, folder)
    tracker = None
    try:
        resume = session.begin()
        if session.recorder is not None:
            tracker = session.recorder.tracker = open_tracker(paths, config, folder)
        os.environ.update(_build_environment(training, folder, resume))
        current = session
        _run(script)
        session.end()
    finally:
        current = None
        session.close()
        if tracker is not None:
            tracker.close(timeout_seconds=0.0)


def _build_environment(training: Training, folder: Path, resume: str) -> dict[str, str]:
    """Return what the script finds in its environment, beside torchrun's variables."""
    config = training.config
    return {
        "KFTRAIN_DATASET": training.manifest_uri,
        "KFTRAIN_RESUME": resume,
        "KFTRAIN_RUN_FOLDER": training.paths.uri,
        "KFTRAIN_CHECKPOINT_FOLDER": str(folder / "checkpoints"),
        "KFTRAIN_STEPS": str(config.train.steps),
        "KFTRAIN_GLOBAL_BATCH_SIZE": str(config.train.global_batch_size),
        "KFTRAIN_SEED": str(config.run.seed),
        # Rank 0 listens already: init_process_group must connect there, as it does under torchrun's own agent.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": training.paths.run_id,
    }


def _run(script: Script) -> None:
    """Run the script. Raises UserCodeError for its exceptions, RetryableError where it asks for another attempt."""
    with user_code(WHERE):
        try:
            script.run()
        except SystemExit as end:
            if end.code in (None, 0):
                return
            is_retryable = isinstance(end.code, int) and end.code >= FIRST_RETRYABLE_CODE
            kind = RetryableError if is_retryable else UserCodeError
            raise kind("the script has ended with an exit code", where=WHERE, value=end.code) from end


def _store_node(folder: Path, uri: str) -> dict[str, Any]:
    with storage.simplify_errors(uri, "the checkpoint could not be committed"):
        return {name: entry.model_dump() for name, entry in folders.store_folder(folder, uri).items()}


def require_tensors(folder: Path, model: torch.nn.Module, kind: str) -> dict[str, FileEntry]:
    """Return the files of tensors in a folder. Raises CheckpointError unless they hold exactly this model's state."""
    files = {
        path.name: FileEntry(bytes=path.stat().st_size, sha256=storage.sha256_file(str(path)))
        for path in sorted(folder.glob("*.safetensors"))
    }
    fix = f"write the state of the model that model.kind ({kind}) builds as safetensors, or name your own by model.kind"
    if not files:
        raise CheckpointError("the export has no .safetensors", where=f"kftrain.complete {folder}", fix=fix)
    manifest = ExportManifest(checkpoint_digest="", training_digest="", dataset_digest="", step=0, files=files)
    with export_tensors.open_tensors(str(folder), manifest) as tensors:
        misfit = ModelSlots(model).misfit(tensors.forms)
    if misfit:
        raise CheckpointError(
            f"evaluation cannot load this export: {misfit}", where=f"kftrain.complete {folder}", fix=fix
        )
    return files


@dataclasses.dataclass(frozen=True)
class _Alone(World):
    """A world of one process, without a process group: what rank 0 decides before the script has made any."""

    @classmethod
    def build(cls) -> _Alone:
        no_group: Any = None
        return cls(0, 1, torch.device("cpu"), no_group, no_group)

    def gather_slowly(self, value: Any) -> list[Any]:
        """Return the one value."""
        return [value]

    def from_main(self, value: Any) -> Any:
        """Return the value."""
        return value
