"""The pipeline on a real cluster: pods of two nodes train what a laptop trains, to the last bit."""

import subprocess
import sys
from pathlib import Path

import pytest
from e2e.commands import kftrain, options, running
from e2e.namespace import wait_until
from helpers.jobs import losses

from kftrain.run import attempts, documents
from kftrain.run.documents import Registration
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.timeout(1200, func_only=True)

ROOT = Path(__file__).parents[2]
TWO_NODES = {"launch.nodes": 2, "launch.processes_per_node": 2}


@pytest.fixture(scope="module")
def laptop_losses(tmp_path_factory, kubeconfig):
    """Of four processes here, never interrupted."""
    folder = tmp_path_factory.mktemp("laptop")
    run_uri = kftrain("shard", *options({"launch.processes_per_node": 4}), folder=folder)["run_uri"]
    kftrain("train", run_uri, folder=folder)
    return losses(RunPaths(run_uri))


def test_two_nodes_train_evaluate_register_and_equal_the_laptop(settings, namespace, laptop_losses, tmp_path):
    names = set()
    with running("run", *options({**settings, **TWO_NODES}), folder=tmp_path) as command:
        paths = RunPaths(command.wait_for(" in s3://").split()[-1])
        wait_until(lambda: names.update(namespace.jobs()) or command.process.poll() is not None, 900, "the end")
        command.finish()
    assert losses(paths) == laptop_losses
    assert {name.rsplit("-", 1)[-1] for name in names} == {"train", "evaluate"}
    registration = documents.read(Registration, paths.registration)
    assert registration.promoted and registration.metric == "bits_per_byte"
    assert namespace.jobs() == {} and wait_until(lambda: not namespace.workers(), 60, "the end of the pods")


def test_a_deleted_worker_costs_one_attempt_and_no_step(settings, namespace, laptop_losses, tmp_path):
    run_uri = kftrain("shard", *options({**settings, **TWO_NODES}), folder=tmp_path)["run_uri"]
    with running("train", run_uri, folder=tmp_path) as training:
        training.wait_for("checkpoint at step 10 started")
        namespace.delete_pod(next(name for name in namespace.workers() if name.endswith("-worker-1")))
        training.finish()
    assert losses(RunPaths(run_uri)) == laptop_losses
    assert attempts.find_last_attempt(RunPaths(run_uri)) == 2
    assert "attempt 2:" in training.output and "going on after step" in training.output


def test_a_users_image_trains_a_users_model(settings, images, builder, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples" / "own_task"))
    image = builder.derive("own", "examples/own-image/Dockerfile", "examples/own_task", images["trainer"])
    pairs = {**settings, "launch.kubernetes.trainer_image": image, "train.steps": 40}
    overrides = [part for key, value in pairs.items() for part in ("--set", f"{key}={value}")]
    with running("run", "--config", ROOT / "examples/own_task/diabetes.yaml", *overrides, folder=tmp_path) as command:
        paths = RunPaths(command.wait_for(" in s3://").split()[-1])
        command.finish()
    assert documents.read(Registration, paths.registration).metric == "rmse"


def test_encoded_images_are_decoded_on_the_nodes_as_on_the_laptop(settings, images, tmp_path):
    """JPEG, PNG and WebP with random crops."""
    make = [sys.executable, ROOT / "examples" / "make_images.py", tmp_path / "photos", "--images", "300"]
    subprocess.run(make, check=True)
    small = {"train.steps": 30, "checkpoint.interval_steps": 10, "evaluate.interval_steps": 0}
    small["train.log_interval_steps"] = 1

    def arguments(pairs):
        chosen = [part for key, value in pairs.items() for part in ("--set", f"{key}={value}")]
        return ["--config", ROOT / "examples/images.yaml", *chosen]

    alone = kftrain("shard", *arguments({**small, "launch.processes_per_node": 4}), folder=tmp_path)["run_uri"]
    kftrain("train", alone, folder=tmp_path)
    with running("run", *arguments({**settings, **TWO_NODES, **small}), folder=tmp_path) as command:
        paths = RunPaths(command.wait_for(" in s3://").split()[-1])
        command.finish()
    assert losses(paths) == losses(RunPaths(alone))
    assert documents.read(Registration, paths.registration).metric == "accuracy"
