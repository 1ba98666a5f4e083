"""A real MLflow on sqlite, and runs that completed and were evaluated, as small files."""

import hashlib
import io
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.fakes.mlflow_server import Server

pytest.importorskip("mlflow")

from kftrain import registry, tracking
from kftrain.config import Config, parse
from kftrain.core import storage
from kftrain.evaluate.session import sums_by_slice
from kftrain.run.documents import Completion, Evaluation, Registration, Slice
from kftrain.run.paths import RunPaths
from kftrain.statistics import bootstrap
from kftrain.tracking import client, model_client

NUM_GROUPS = 60


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A real `mlflow server`, which is started once."""
    running = Server(tmp_path_factory.mktemp("server"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def accuracy(sums):
    return {"accuracy": sums["correct"] / sums["count"], "error": 1 - sums["correct"] / sums["count"]}


@dataclass(frozen=True)
class FinishedRun:
    """A run as the evaluation leaves it."""

    config: Config
    paths: RunPaths
    completion: Completion
    evaluation: Evaluation
    mlflow_run_id: str

    def register(self):
        return registry.register(self.config, self.paths, self.completion, self.evaluation, self.mlflow_run_id)

    def gate(self, registered, config=None, *told) -> Registration:
        return registry.gate_and_promote(
            config or self.config, self.paths, registered, self.completion, self.evaluation, accuracy, *told
        )

    def submit(self, config=None, *told) -> Registration:
        return self.gate(self.register(), config, *told)


def write_export(paths, name):
    content = f"tensors of {name}".encode()
    uri = paths.export(hashlib.sha256(content).hexdigest())
    storage.publish(storage.join(uri, "model.safetensors"), content)
    files = {"model.safetensors": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    digests = {"checkpoint_digest": "c", "training_digest": "t", "dataset_digest": "d"}
    manifest = {"schema_version": 1, "step": 1, "files": files, **digests}
    storage.publish_json(storage.join(uri, "manifest.json"), manifest)
    return uri, storage.sha256_file(storage.join(uri, "manifest.json"))


def statistics_of(quality):
    """Groups of ten items of which a share `quality` is right, give or take the same noise for every model."""
    count = np.full(NUM_GROUPS, 10.0)
    noise = np.random.default_rng(0).normal(0, 0.3, NUM_GROUPS)
    keys = np.array([f"item-{number:03d}" for number in range(NUM_GROUPS)])
    return {"correct": 10 * quality + noise, "count": count, "keys": keys}


def packed(arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def write_evaluation(paths, completion, statistics, evaluation_digest, slices=None):
    """`slices`: of each group its slice; None: there are none."""
    stream = io.BytesIO()
    np.savez(stream, **statistics)
    folder = paths.evaluation(completion.checkpoint_digest, evaluation_digest)
    storage.publish(storage.join(folder, "statistics.npz"), stream.getvalue())
    parts = {}
    if slices is not None:
        units = np.arange(NUM_GROUPS)
        sums = {name: values for name, values in statistics.items() if name != "keys"}
        parts = {"slices.npz": packed(sums_by_slice(sums, statistics["keys"].tolist(), units, np.array(slices)))}
        storage.publish(storage.join(folder, "slices.npz"), parts["slices.npz"])
    evaluation = Evaluation(
        evaluation_digest=evaluation_digest,
        checkpoint_digest=completion.checkpoint_digest,
        export_uri=completion.export_uri,
        export_digest=completion.export_digest,
        dataset_digest=completion.dataset_digest,
        num_samples=10 * NUM_GROUPS,
        num_groups=NUM_GROUPS,
        confidence=0.95,
        metrics=bootstrap.intervals(accuracy, statistics, 100, 0.95, 0),
        slices={name: Slice(num_samples=1, metrics={}) for name in dict.fromkeys(slices or ())},
        statistics_sha256=hashlib.sha256(stream.getvalue()).hexdigest(),
        slices_sha256=hashlib.sha256(parts["slices.npz"]).hexdigest() if parts else "",
    )
    storage.publish_json(storage.join(folder, "metrics.json"), evaluation.to_dict())
    return evaluation


def finish_run(config, name, quality, evaluation_digest="e" * 64, statistics=None, slices=None):
    """A run whose model answers a share `quality` of everything rightly."""
    paths = RunPaths.of(config.run.storage_root, name)
    export_uri, export_digest = write_export(paths, name)
    completion = Completion(
        run_id=name,
        step=10,
        samples_consumed=320,
        attempt=1,
        world_size=1,
        checkpoint_uri=storage.join(paths.checkpoints, "step-10"),
        checkpoint_digest=hashlib.sha256(name.encode()).hexdigest(),
        export_uri=export_uri,
        export_digest=export_digest,
        dataset_digest="d" * 64,
        training_digest=config.training_digest("d" * 64),
        num_parameters=1,
        metrics={},
        seconds=1.0,
    )
    found = statistics_of(quality) if statistics is None else statistics
    evaluation = write_evaluation(paths, completion, found, evaluation_digest, slices)
    lineage = tracking.DatasetLineage("toy", "d" * 64, "/data/manifest.json")
    return FinishedRun(config, paths, completion, evaluation, tracking.start_run(config, name, lineage))


def config_at(uri, root, **changes):
    settings = {
        "run.name": "toy",
        "run.storage_root": root,
        "tracking.uri": uri,
        "registry.metric": "accuracy",
        "registry.goal": "maximize",
        "evaluate.num_bootstrap": 100,
        **changes,
    }
    return parse("", [f"{key}={value}" for key, value in settings.items()])


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    client.ping(f"sqlite:///{path}")
    return path


@pytest.fixture
def config(empty_database, tmp_path):
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return config_at(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "root")


@pytest.fixture
def finished(config):
    return lambda name, quality, digest="e" * 64, **more: finish_run(config, name, quality, digest, **more)


@pytest.fixture
def finish():
    return finish_run


@pytest.fixture
def make_config():
    return config_at


@pytest.fixture
def measure():
    """Evaluates a finished run under another digest."""

    def evaluated(run, quality, evaluation_digest):
        return write_evaluation(run.paths, run.completion, statistics_of(quality), evaluation_digest)

    return evaluated


@pytest.fixture
def add_statistics():
    """Measures a finished run under another digest, with these sums."""
    return lambda run, statistics, digest: write_evaluation(run.paths, run.completion, statistics, digest)


@pytest.fixture
def metrics():
    return accuracy


@pytest.fixture
def aliases(config):

    return lambda: model_client.get_aliases(config.tracking.uri, "toy")


@pytest.fixture
def add_reference():
    """Measures a finished run under one more evaluation digest."""
    return lambda run, quality, digest: write_evaluation(run.paths, run.completion, statistics_of(quality), digest)
