"""Runs a script for torchrun in the place of our training loop (`train.command`), on each rank of one attempt.

The script runs in this very process, as `__main__`. It decides which process groups of torch there are; the calls of
`kftrain.api` that it makes have a gloo group of their own, outside of torch's list.
"""

from __future__ import annotations

import contextlib
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

from kftrain.checkpoint import export_tensors, folders
from kftrain.checkpoint.filling import ModelSlots
from kftrain.checkpoint.load import Loaded
from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.core.progress import to_log
from kftrain.errors import CheckpointError, ConfigError, KftrainError, LaunchError, Preempted, error_from_dict
from kftrain.launch.spec import ERROR_FILE_ENV
from kftrain.models import build_model
from kftrain.parallel.initialize import construct_empty
from kftrain.parallel.world import SLOW_SECONDS, World
from kftrain.process.liveness import Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.run import commit
from kftrain.run.commit import CheckpointManifest, CheckpointName, FileEntry
from kftrain.run.export import ExportManifest
from kftrain.run.script import WHERE, Script
from kftrain.tracking.base import Tracker
from kftrain.train import completing
from kftrain.train.completing import Finished
from kftrain.train.reading import Training
from kftrain.train.recorder import Recorder
from kftrain.worker.error_report import classify


class ScriptSession:
    """The part of an attempt that one rank has: it answers the script's calls (see `kftrain.api`)."""

    def __init__(
        self, training: Training, stop: StopRequest, world: World, attempt: int, loaded: Loaded | None
    ) -> None:
        """Fetch the files of the checkpoint to each node. Collective; the world may end afterwards."""
        self._training = training
        self._stop = stop
        self._attempt = attempt
        self._start = time.monotonic()
        self._rank = int(os.environ["RANK"])
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._node = int(os.environ["GROUP_RANK"])
        self._size = world.size
        self._num_nodes = world.size // int(os.environ["LOCAL_WORLD_SIZE"])
        self.folder = Path(os.environ[ERROR_FILE_ENV]).parent
        """Folder of the attempt on this node. The supervisor deletes it, however the ranks end."""
        self._store = dist.PrefixStore("kftrain", world.store)  # type: ignore[attr-defined]
        patience = timedelta(seconds=SLOW_SECONDS)
        self._group: Any = dist.ProcessGroupGloo(self._store, self._rank, self._size, timeout=patience)
        self._resume = self.folder / "resume" if loaded else None
        world.agree(lambda: self._fetch(loaded))
        self._last_step = loaded.manifest.step if loaded else 0
        self._committed_step = self._last_step
        self._recorder = Recorder(loaded.history if loaded else [], None, training.config.train.steps)
        self._liveness = Liveness(lambda: None, training.config.launch.timeout_seconds, counts_always=True)
        self._watch = contextlib.ExitStack()
        self._is_watched = False
        self._is_complete = False

    @property
    def is_main(self) -> bool:
        """True on the rank that commits, completes and records."""
        return self._rank == 0

    def _fetch(self, loaded: Loaded | None) -> None:
        if self._local_rank == 0:
            (self.folder / "checkpoints").mkdir()
            if loaded and self._resume:
                folders.fetch_folder(loaded.uri, loaded.manifest.files, self._resume)

    def run(self, tracker: Tracker | None) -> None:
        """Run the script to its end. Raises Preempted after a stop, LaunchError without `complete`, UserCodeError."""
        global current
        training = self._training
        script = Script.parse(training.config.train.command)
        script.require_digest(training.config.train.command_digest)
        self._recorder = Recorder(self._recorder.history, tracker, training.config.train.steps)
        os.environ.update(self._build_environment())
        if self.is_main:
            resumed = f", going on after step {self._last_step}" if self._resume else ""
            to_log(f"attempt {self._attempt}: {script.name}, {self._size} processes{resumed}")
        current = self
        try:
            _run(script)
            self._watch.close()  # the others wait below while rank 0 exports, however long that takes
            with contextlib.suppress(RuntimeError):  # a rank is gone, whose own error says why
                self._find_greatest(0)  # the others use the store of rank 0 to their end
            self._require_end()
        finally:
            current = self._group = None
            self._watch.close()  # first: a last beat that is watched would be taken for a hang
            self._liveness.close()
            if dist.is_initialized():  # a process that exits with gloo alive dies of SIGABRT
                dist.destroy_process_group()
            if tracker is not None:
                tracker.close(timeout_seconds=0.0)

    def _build_environment(self) -> dict[str, str]:
        config = self._training.config
        return {
            "KFTRAIN_DATASET": self._training.manifest_uri,
            "KFTRAIN_RESUME": str(self._resume or ""),
            "KFTRAIN_RUN_FOLDER": self._training.paths.uri,
            "KFTRAIN_CHECKPOINT_FOLDER": str(self.folder / "checkpoints"),
            "KFTRAIN_STEPS": str(config.train.steps),
            "KFTRAIN_GLOBAL_BATCH_SIZE": str(config.train.global_batch_size),
            "KFTRAIN_SEED": str(config.run.seed),
            # Rank 0 listens already: init_process_group must connect there, as it does under torchrun's own agent.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": self._training.paths.run_id,
        }

    def _require_end(self) -> None:
        if self._is_complete or not self.is_main:  # a script may call `complete` on the first rank alone
            return
        if self._stop.requested:
            raise Preempted(f"the script stopped when it was asked to; step {self._committed_step} is committed")
        what = "the script has ended without kftrain.complete(), so nothing says that the training is done"
        command = " ".join(self._training.config.train.command)
        raise LaunchError(what, where=WHERE, value=command, fix="call kftrain.complete(export) after the last commit")

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `kftrain.api.report`."""
        if step <= self._last_step:
            raise ConfigError("steps must grow", where="kftrain.report", value=step, fix="report each step once")
        if not self._is_watched:  # from here on, as only the script knows when its steps begin
            self._watch.enter_context(self._liveness.mark_watched())
            self._is_watched = True
        self._liveness.note_progress()
        num_steps, self._last_step = step - self._last_step, step
        if self.is_main:
            values = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
            num_samples = num_steps * self._training.config.train.global_batch_size
            self._recorder.record(step, values, num_steps, num_samples)

    def should_stop(self) -> bool:
        """See `kftrain.api.should_stop`."""
        self._liveness.note_progress()
        return bool(self._find_greatest(int(self._stop.requested)))

    def commit(self, folder: Path, step: int | None) -> None:
        """See `kftrain.api.commit`."""
        # All have come, and written their files, before the first file is copied. A rank that does not come is watched.
        name = CheckpointName(self._find_greatest(self._last_step if step is None else step), self._attempt)
        if name.step <= self._committed_step:
            fix = "report the next step first, or give commit its step"
            raise ConfigError("this step is committed already", where="kftrain.commit", value=name.step, fix=fix)
        with self._liveness.mark_resting():
            uri = storage.join(self._training.paths.checkpoints, str(name))
            self._agree(lambda: self._copy(folder, uri, name) if self._local_rank == 0 else None)
            self._agree(lambda: self._publish(name, uri) if self.is_main else None)
        self._committed_step = self._last_step = name.step

    def _copy(self, folder: Path, uri: str, name: CheckpointName) -> None:
        """Copy this node's files, and tell rank 0 which they are."""
        with storage.simplify_errors(uri, "the checkpoint could not be committed"):
            entries = {file: entry.model_dump() for file, entry in folders.store_folder(folder, uri).items()}
        self._store.set(f"{name}/{self._node}", json.dumps(entries))

    def _publish(self, name: CheckpointName, uri: str) -> None:
        """Commit what all nodes have copied."""
        files: dict[str, FileEntry] = {}
        for node in range(self._num_nodes):
            for file, fields in json.loads(self._store.get(f"{name}/{node}")).items():
                entry = FileEntry.model_validate(fields)
                if files.setdefault(file, entry) != entry:
                    what = "two nodes have written different files of one name"
                    raise CheckpointError(what, where="kftrain.commit", value=folders.decode_name(file))
        training, history = self._training, storage.dump_json(self._recorder.history)
        storage.publish(storage.join(uri, commit.HISTORY), history)
        manifest = CheckpointManifest(
            step=name.step,
            samples_consumed=name.step * training.config.train.global_batch_size,
            attempt=self._attempt,
            world_size=self._size,
            dataset_digest=training.manifest.dataset_digest,
            training_digest=training.digest,
            training_identity=training.identity,
            files={**files, commit.HISTORY: commit.make_entry(history)},
            parts={"script": 1},
        )
        commit.commit(training.paths, name, manifest)
        saving = training.config.checkpoint
        commit.retire_checkpoints(training.paths, saving.keep_last, self._attempt, keep_every=saving.keep_every)
        storage.publish(training.paths.history, history)

    def complete(self, export: Path) -> None:
        """See `kftrain.api.complete`."""
        if not self.is_main:
            return
        if self._last_step > self._committed_step or not self._committed_step:
            fix = "call kftrain.commit(folder) after the last step"
            raise CheckpointError("the last step is not committed", where="kftrain.complete", fix=fix)
        training, config = self._training, self._training.config
        with self._liveness.mark_resting():
            arguments = completing.ask_model_arguments(training.task)
            model = construct_empty(lambda: build_model(config.model, arguments))
            require_tensors(export, model, config.model.kind)
            finished = Finished(
                attempt=self._attempt,
                world_size=self._size,
                num_parameters=sum(parameter.numel() for parameter in model.parameters()),
                history=self._recorder.history,
                description=completing.describe_export(model, config, training.task, arguments),
                last_step=self._committed_step,
                selection=None,
                copy_tensors=lambda target: {
                    path.name: folders.copy_file(str(path), storage.join(target, path.name))
                    for path in _list_tensor_files(export)
                },
            )
            completing.complete(training, finished, time.monotonic() - self._start)
        self._is_complete = True

    def _find_greatest(self, value: int) -> int:
        """Return the greatest value of all ranks. Collective; it fails at once where a rank is gone."""
        greatest = torch.tensor([value])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._group.allreduce([greatest], options).wait()
        return int(greatest.item())

    def _agree(self, work: Callable[[], None]) -> None:
        """Do work, and raise the error of a rank on all. Collective."""
        failed_rank = -1
        try:
            work()
        except (KftrainError, OSError) as error:
            known = classify(error) or CheckpointError(f"{type(error).__name__}: {error}", where="kftrain.commit")
            self._store.set(f"error/{self._rank}", json.dumps(known.to_dict()))
            failed_rank = self._rank
        if (failed_rank := self._find_greatest(failed_rank)) >= 0:
            raise error_from_dict(json.loads(self._store.get(f"error/{failed_rank}")))


current: ScriptSession | None = None
"""The session of this process, while the script runs."""


def _run(script: Script) -> None:
    with user_code(WHERE):
        try:
            script.run()
        except SystemExit as end:
            if end.code:
                raise


def _list_tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def require_tensors(folder: Path, model: torch.nn.Module, kind: str) -> None:
    """Raise CheckpointError unless the files of tensors in a folder hold exactly this model's state."""
    fix = f"write the state of the model that model.kind ({kind}) builds as safetensors, or name your own by model.kind"
    sizes = {path.name: FileEntry(bytes=path.stat().st_size, sha256="") for path in _list_tensor_files(folder)}
    if not sizes:
        raise CheckpointError("the export has no .safetensors", where=f"kftrain.complete {folder}", fix=fix)
    manifest = ExportManifest(checkpoint_digest="", training_digest="", dataset_digest="", step=0, files=sizes)
    with export_tensors.open_tensors(str(folder), manifest) as tensors:
        misfit = ModelSlots(model).misfit(tensors.forms)
    if misfit:
        what = f"evaluation cannot load this export: {misfit}"
        raise CheckpointError(what, where=f"kftrain.complete {folder}", fix=fix)
