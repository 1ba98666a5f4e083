"""The documents of a run that is through: shards, completion, evaluation, registration; no training, no MLflow."""

import hashlib
import json

from kftrain import config
from kftrain.core import storage
from kftrain.evaluate.identity import evaluation_digest
from kftrain.run.commit import FileEntry
from kftrain.run.documents import Completion, Confusion, Evaluation, Interval, Registration, RunShards
from kftrain.run.paths import RunPaths
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.stages import resolve
from kftrain.tasks import build_task

DIGITS = """
run: {name: tiny}
data: {source: digits, shard_size_bytes: 1000000, validation_fraction: 0.1}
task: {kind: image_classification, image_size: 8, num_classes: 10, max_value: 16}
model: {kind: vision_transformer, dim: 16, num_layers: 1, num_heads: 2}
train: {steps: 20, global_batch_size: 16}
evaluate: {num_bootstrap: 100}
registry: {metric: accuracy, goal: maximize}
"""


def digits_config(root, *overrides):
    """A configuration that trains in seconds, with everything below `root`."""
    below = [f"run.storage_root={root}/store", f"tracking.uri=sqlite:///{root}/mlflow.db"]
    return config.parse(DIGITS, [*below, *overrides])


def interval(value, width=0.01):
    return Interval(value=value, low=value - width, high=value + width)


def completion_of(paths, resolved, dataset_digest, **changes):
    fields = {
        "run_id": paths.run_id,
        "step": resolved.train.steps,
        "samples_consumed": 320,
        "attempt": 1,
        "world_size": 2,
        "checkpoint_uri": f"{paths.checkpoints}/step-00000020-a1",
        "checkpoint_digest": "c" * 64,
        "export_uri": paths.export("c" * 64),
        "export_digest": "e" * 64,
        "dataset_digest": dataset_digest,
        "training_digest": resolved.training_digest(dataset_digest),
        "num_parameters": 12345,
        "metrics": {"loss": 0.5, "samples_per_second": 100.0},
        "seconds": 3.0,
    }
    return Completion(**{**fields, **changes})


def evaluation_of(resolved, completion, **changes):
    fields = {
        "evaluation_digest": evaluation_digest(resolved, completion.dataset_digest),
        "checkpoint_digest": completion.checkpoint_digest,
        "export_uri": completion.export_uri,
        "export_digest": completion.export_digest,
        "dataset_digest": completion.dataset_digest,
        "num_samples": 164,
        "num_groups": 164,
        "confidence": 0.95,
        "metrics": {"accuracy": interval(0.9), "cross_entropy": interval(0.4)},
        "baselines": {"accuracy": {"most frequent class": 0.13}},
        "confusion": Confusion(labels=["a", "b"], matrix=[[3, 1], [0, 4]]),
        "statistics_sha256": "5" * 64,
    }
    return Evaluation(**{**fields, **changes})


def registration_of(paths, resolved, **changes):
    fields = {
        "run_id": paths.run_id,
        "model_name": resolved.model_name,
        "version": 3,
        "logged_model_id": "m-1",
        "mlflow_run_id": "mlflow-1",
        "tracking_uri": resolved.tracking.uri,
        "promoted": True,
        "reason": "better by 0.02",
        "metric": "accuracy",
        "goal": "maximize",
        "challenger": interval(0.9),
        "champion_version": 2,
        "champion": interval(0.88),
        "improvement": interval(0.02),
    }
    return Registration(**{**fields, **changes})


def opened_run(resolved, run_id, must_exist=False):
    """A run as the first step opens it."""
    run = resolve.open_run(resolved, run_id, must_exist)
    resolve.keep_run(run)
    return run


def sharded_run(root, *overrides, run_id="r-1"):
    """A run with shards, ready to train."""
    resolved = digits_config(root, *overrides)
    paths = RunPaths.of(resolved.run.storage_root, run_id)
    result = shard_dataset(resolved, build_task(resolved.task), lambda line: None)
    shards = RunShards(manifest_uri=result.manifest_uri, dataset_digest=result.dataset_digest)
    storage.publish_json(paths.shards, shards.to_dict())
    storage.publish(paths.config, resolved.to_yaml())
    return paths, resolved, shards


def finished_run(root, *overrides):
    """A run with all its documents."""
    paths, resolved, shards = sharded_run(root, *overrides)
    completion = completion_of(paths, resolved, shards.dataset_digest)
    publish_export(completion.export_uri)
    evaluation = evaluation_of(resolved, completion)
    folder = paths.evaluation(completion.checkpoint_digest, evaluation.evaluation_digest)
    storage.publish_json(paths.complete, completion.to_dict())
    storage.publish_json(storage.join(folder, "metrics.json"), evaluation.to_dict())
    storage.publish_json(paths.registration, registration_of(paths, resolved).to_dict())
    return paths, resolved


def publish_commit(paths, step=10, identity=None):
    """A committed checkpoint as readers list it: the run has trained. With an identity it has a manifest."""
    folder, digest = f"{paths.checkpoints}/step-{step:08d}-a1", "0" * 64
    if identity is not None:
        numbers = {"step": step, "samples_consumed": 1, "attempt": 1, "world_size": 1, "files": {}}
        digests = {"dataset_digest": "d", "training_digest": "t", "training_identity": identity}
        content = json.dumps({"schema_version": 1, **numbers, **digests})
        digest = storage.sha256_text(content)
        storage.publish(f"{folder}/manifest.json", content)
    storage.publish(f"{folder}/COMMITTED", digest)


def publish_export(uri):
    """An export of one file, whole as `completion` sees it; returns its URI."""
    storage.publish(f"{uri}/model.safetensors", b"tensors")
    files = {"model.safetensors": {"bytes": 7, "sha256": "0" * 64}}
    digests = {"checkpoint_digest": "c", "training_digest": "t", "dataset_digest": "d"}
    manifest = {"schema_version": 1, "step": 1, "files": files, **digests}
    storage.publish_json(f"{uri}/manifest.json", manifest)
    return uri


def publish_described_export(uri, description, task_files=None):
    """A whole export with this `kftrain.json`, and files of its task; returns its digest."""
    contents = {"model.safetensors": b"tensors", "kftrain.json": json.dumps(description).encode(), **(task_files or {})}
    for name, content in contents.items():
        storage.publish(f"{uri}/{name}", content)
    files = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    digests = {"checkpoint_digest": "c", "training_digest": "t", "dataset_digest": "d"}
    manifest = json.dumps({"schema_version": 1, "step": 1, "files": files, **digests})
    storage.publish(f"{uri}/manifest.json", manifest)
    return hashlib.sha256(manifest.encode()).hexdigest()


def entry_of(uri):
    """A file's size and digest as it lies in storage."""
    return FileEntry(bytes=storage.size_bytes(uri), sha256=storage.sha256_file(uri))
