"""The product from Python, as a notebook uses it: what `import kftrain` gives.

    import kftrain

    config = kftrain.load_config("digits.yaml", ["train.steps=200"])
    run = kftrain.run_pipeline(config)             # here, or kftrain.submit_pipeline(config, host=…) on Kubeflow
    run.metrics                                    # {"accuracy": 0.98, …}
    kftrain.load_export(run.uri).model             # a torch.nn.Module
    kftrain.open_dataset(run.uri, "validation")    # what it was measured on

Every function raises a `kftrain.errors.KftrainError`: what is wrong, where, and what to do about it, on one line.
Nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kftrain import config as configuration
from kftrain.client.completed_run import CompletedRun as CompletedRun
from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError, LaunchError
from kftrain.run import documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths
from kftrain.trust import Trust, permit_kinds

if TYPE_CHECKING:
    from kftrain.checkpoint.export import LoadedExport
    from kftrain.client.submit import SubmittedRun
    from kftrain.data.opened import OpenedDataset
    from kftrain.tasks.base import Task
    from kftrain.tasks.settings import TaskConfig
    from kftrain.train.script_session import ScriptSession

STARTED_BY = "kftrain.run_pipeline(config)"
"""Call that starts such a run anew, for people who read of a failure."""


def load_config(files: str | Path | Sequence[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load the configuration from one or several YAML files; without one, every default.

    Args:
        files: A later one wins over an earlier one, key by key.
        overrides: Like `train.steps=200`; they win over every file.

    Raises ConfigError that names the file, the key, the value and the fix.
    """
    return configuration.load(files, overrides)


def run_pipeline(config: Config | None = None, *, workdir: str | Path = ".", resume: str = "") -> CompletedRun:
    """Run the whole pipeline on this machine, as `kftrain run` does, and return the complete run.

    Progress goes to stderr, everything else to `<workdir>/logs/`. An interrupt (Ctrl-C, the notebook's stop button)
    lets training commit a checkpoint first, if this is called in the main thread.

    Args:
        config: From `load_config`. None: the defaults, or what the run to resume has.
        workdir: Relative paths start there.
        resume: The run to go on with: its id, or the URI of its folder.

    Raises the error of the step that failed, InterruptedByUser after an interrupt.
    """
    from kftrain.client.local_run import place_run, run_here

    folder = Path(workdir).expanduser().resolve()
    placed, resume_run = place_run(config or Config(), (), folder, resume, keep=config is None)
    ended = run_here(placed, resume_run, folder, STARTED_BY)
    if ended.error is not None:
        raise ended.error.to_error()
    return CompletedRun.read(ended.run_uri)


def compile_pipeline(
    path: str | Path | None = None,
    *,
    steps_image: str | None = None,
    launcher_cpu: str | None = None,
    launcher_memory: str | None = None,
) -> str:
    """Compile the pipeline to YAML for the Kubeflow UI, the same every time; write it to `path`, too, if given.

    Args:
        path: File to write.
        steps_image: Image of the steps; None: the one of this version.
        launcher_cpu: CPU request of the steps train and evaluate, as Kubernetes writes it; None: 100m.
        launcher_memory: Their memory request; None: 512Mi.

    Raises ConfigError for what is no quantity of Kubernetes.
    """
    from kftrain.client.compile import compile_with

    with compile_with(steps_image, launcher_cpu, launcher_memory):
        from kftrain.pipelines.compile import compiled

        text = str(compiled())
    if path is not None:
        Path(path).write_text(text)
    return text


def submit_pipeline(
    config: Config | None = None,
    *,
    host: str = "",
    namespace: str = "",
    resume: str = "",
    experiment: str = "",
    run_name: str = "",
    steps_image: str | None = None,
    ca_file: str | None = None,
) -> SubmittedRun:
    """Upload the pipeline to Kubeflow and start a run of it; `.wait()` on the result follows the run.

    It logs in as `kftrain submit` does: with KFP_EXISTING_TOKEN, or in a pod with the token that is mounted for
    Kubeflow Pipelines.

    Args:
        config: From `load_config`; `launch.backend` must not be `local`. None: the defaults, or what the run to resume
            has.
        host: URL of Kubeflow Pipelines; empty: KF_PIPELINES_ENDPOINT, else in a pod the one of this cluster.
        namespace: Yours, on a multi-user installation.
        resume: The run to go on with: its id, or the URI of its folder.
        experiment: Of Kubeflow; empty: named as that of MLflow.
        run_name: What the UI calls the run; empty: its name and the time.
        steps_image: Image of the steps; None: the one of this version.
        ca_file: Certificates to trust; None: the public ones.

    Raises ConfigError, and LaunchError for what cannot run there or what Kubeflow refuses.
    """
    from kftrain.client.local_run import place_run
    from kftrain.client.submit import build_submission, submit
    from kftrain.kubeflow.client import ENDPOINT_ENV, TOKEN_ENV, Connection, Pipelines, find_in_cluster_host
    from kftrain.stages import preflight

    placed, resume_run = place_run(config or Config(), (), Path.cwd(), resume, keep=config is None)
    preflight.require_remote(placed)
    url = host or os.environ.get(ENDPOINT_ENV, "") or find_in_cluster_host()
    submission = build_submission(placed, resume_run, url, experiment, run_name, steps_image=steps_image)
    return submit(Pipelines(Connection(url, namespace, TOKEN_ENV, ca_file)), submission, placed, resume_run)


def open_dataset(
    uri: str,
    split: Literal["train", "validation"] = "train",
    *,
    task: Task | TaskConfig | None = None,
    verify: bool = True,
) -> OpenedDataset:
    """Open the samples of one split for loops of your own: by number, in the training order, or as WebDataset.

        dataset = kftrain.open_dataset(run.uri, "train", task=run.config.task)
        dataset[7]                                                     # a sample, also for torch's DataLoader
        dataset.in_training_order(seed=0, batch_size=32)               # torch's IterableDataset, with a state
        webdataset.DataPipeline(dataset.as_webdataset, …)              # as it is stored

    Args:
        uri: A run, a folder of shards, or their manifest.json.
        split: Which samples.
        task: How they are decoded: a task, or the section of a configuration; None: samples are as they are stored.
        verify: Whether a shard is hashed before its first sample is given, once on a node.

    Raises ConfigError for another split, DataError where there are no shards or they are damaged.
    """
    from kftrain.data.opened import OpenedDataset
    from kftrain.data.schema import SPLITS
    from kftrain.data.shards.cache import NodeCache
    from kftrain.data.shards.manifest import read_manifest, reading
    from kftrain.tasks.base import Task
    from kftrain.tasks.registry import build_task_of
    from kftrain.tasks.run_dataset import find_manifest

    if split not in SPLITS:
        raise ConfigError("no such split", where="open_dataset", value=split, fix=f"one of: {', '.join(SPLITS)}")
    manifest_uri = find_manifest(uri)
    with reading(manifest_uri):
        cache = None if storage.is_local(manifest_uri) else NodeCache.of_node("", "auto")
        manifest = read_manifest(manifest_uri, cache)
    if task is not None and not isinstance(task, Task):
        permit_kinds([task.kind])
        task = build_task_of(task, manifest_uri, manifest.task_settings)
    return OpenedDataset(manifest_uri, manifest, split, task, verify)


def report(step: int, metrics: Mapping[str, float]) -> None:
    """Tell from a script of `train.command` how far it is; call it on every rank.

    The values of rank 0 are the training curve. A rank that has reported once must go on to: one that neither reports
    nor takes part in a collective operation for twice `launch.timeout_seconds` is taken for hung. Outside of a job this
    and the three others do nothing, so that torchrun alone runs the script, too.

    Args:
        step: Steps that are done; it must grow.
        metrics: Name -> value; what is not finite is left out.

    Raises ConfigError for a step that does not grow.
    """
    if (session := _find_session()) is not None:
        session.report(step, metrics)


def should_stop() -> bool:
    """Tell a script whether it is asked to stop: it should commit and end. Then the next attempt goes on from there.

    Collective over all ranks, so that they stop at the same step. Raises LaunchError in a process that is no rank.
    """
    session = _find_session()
    return session is not None and session.should_stop()


def commit(folder: str | Path, step: int | None = None) -> None:
    """Commit the files of a local folder as the checkpoint of a step; all ranks call it, once their files are written.

    The first rank of each node copies that node's folder. All or nothing: a checkpoint counts from its last file on.

    Args:
        folder: The next attempt finds a copy of it at KFTRAIN_RESUME.
        step: None: the one that was reported last.

    Raises ConfigError for a step that is committed already, CheckpointError for no or changing files, StorageError,
    FencedError.
    """
    if (session := _find_session()) is not None:
        session.commit(Path(folder), step)


def complete(export: str | Path) -> None:
    """End a script's training: rank 0 exports the model and writes COMPLETE.json; other ranks return at once.

    Args:
        export: Folder with the state of the model that `model.kind` builds, in files of the format safetensors.

    Raises CheckpointError where the last step is not committed, or the tensors are not that model's.
    """
    if (session := _find_session()) is not None:
        session.complete(Path(export))


def _find_session() -> ScriptSession | None:
    """Return the session of this rank; None outside of a job. Raises LaunchError in a process that the script made."""
    module = sys.modules.get("kftrain.train.script_session")
    session: ScriptSession | None = module.current if module is not None else None
    if session is None and "KFTRAIN_RUN_FOLDER" in os.environ:
        raise LaunchError("this process is no rank of the job", where="kftrain", fix="call it from the script itself")
    return session


def load_export(run_uri: str, *, trusted_kinds: Sequence[str] = ()) -> LoadedExport:
    """Load the trained model of a run, in evaluation mode on the CPU, with its task.

    Every byte is checked against its digest, and nothing is unpickled.

    Args:
        run_uri: The run's folder, or a local path of it.
        trusted_kinds: `module:attr` of models and tasks of your own that may be built, beside the built-in ones and
            those in KFTRAIN_TRUSTED_KINDS.

    Raises CheckpointError where the run is not complete or its export is damaged, ConfigError for kinds and places that
    are not allowed.
    """
    from kftrain.checkpoint.export import load_export as load

    paths = RunPaths(storage.absolute(run_uri))
    completion = documents.read(Completion, paths.complete, CheckpointError)
    listed = Trust.by_default()
    trust = Trust(listed.kinds | set(trusted_kinds), (paths.storage_root, *listed.roots))
    return load(completion.export_uri, completion.export_digest, trust)
