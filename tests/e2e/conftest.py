"""A real cluster for end-to-end tests: images, a namespace for each module, an object store and an MLflow server."""

import os
import socket
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
import yaml
from e2e.images import Builder
from e2e.kfp_step import Steps
from e2e.namespace import Namespace, held_images
from e2e.operator_control import Operator
from helpers.fakes.mlflow_server import Server
from helpers.fakes.object_store import BUCKET, ObjectStore


@pytest.fixture(scope="session")
def kubeconfig(request):
    path = request.config.getoption("--kubeconfig", default="")
    if not path or not Path(path).is_file():
        pytest.skip("no cluster: make e2e KUBECONFIG=FILE LOAD='kind load image-archive'")
    os.environ["KUBECONFIG"] = path
    return path


@pytest.fixture(scope="session")
def host_address(kubeconfig):
    """Where pods reach this machine: the address from which it reaches the API server."""
    server = yaml.safe_load(Path(kubeconfig).read_text())["clusters"][0]["cluster"]["server"]
    address = urllib.parse.urlsplit(server)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address.hostname, address.port or 443))
        return probe.getsockname()[0]


@pytest.fixture(scope="session")
def builder(request, kubeconfig):
    option = request.config.getoption
    return Builder(option("--engine"), option("--load"), option("--base"), option("--build-flags"))


@pytest.fixture(scope="session")
def images(builder):
    """Name -> tag of the images of the present code, which the nodes hold."""
    return {name: builder.ensure(name, held_images()) for name in ("trainer", "steps")}


@pytest.fixture(scope="session")
def store(host_address):
    running = ObjectStore(host=host_address, listen="0.0.0.0")
    running.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running
    running.stop()


@pytest.fixture(scope="session")
def mlflow_uri(host_address, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("mlflow"), host=host_address, listen="0.0.0.0")
    server.start()
    yield server.uri
    server.stop()


@pytest.fixture(scope="module")
def namespace(kubeconfig, store, request):
    """A namespace that enforces the Pod Security standard `restricted`, with the credentials of the object store."""
    with Namespace.create(labels={"pod-security.kubernetes.io/enforce": "restricted"}) as found:
        found.create_secret("kftrain-storage", store.environment)
        yield found


@pytest.fixture(scope="session")
def kfp_namespace(request, kubeconfig, store):
    """The namespace of Kubeflow Pipelines, whose `pipeline-runner` its steps run as."""
    found = Namespace(request.config.getoption("--kfp-namespace") or "kubeflow")
    accounts = {account.metadata.name for account in found.core.list_namespaced_service_account(found.name).items}
    if "pipeline-runner" not in accounts:
        pytest.skip(f"namespace {found.name} has no service account pipeline-runner: Kubeflow Pipelines is not there")
    found.create_secret("kftrain-storage", store.environment)
    yield found
    found.delete_secret("kftrain-storage")


@pytest.fixture(scope="session")
def operator(kubeconfig):
    found = Operator()
    yield found
    found.come_back()


@pytest.fixture(scope="session")
def compiled(images, tmp_path_factory):
    """The pipeline's YAML, with the image of the present code."""
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    command = [sys.executable, "-m", "kftrain", "compile", "-o", str(path), "--steps-image", images["steps"]]
    subprocess.run(command, check=True)
    return path.read_text()


@pytest.fixture
def kfp_steps(kfp_namespace, compiled):
    """Steps of one pipeline run."""
    with Steps.of_one_run(kfp_namespace, compiled) as found:
        yield found


@pytest.fixture(scope="module")
def settings(namespace, images, mlflow_uri):
    """Overrides of a small training on the cluster, by key."""
    return {
        "run.storage_root": f"s3://{BUCKET}/root",
        "tracking.uri": mlflow_uri,
        "launch.backend": "pytorchjob",
        "launch.kubernetes.namespace": namespace.name,
        "launch.kubernetes.trainer_image": images["trainer"],
        "launch.kubernetes.cpu": "1",
        "launch.kubernetes.memory": "2Gi",
        "launch.kubernetes.shared_memory": "256Mi",
    }


@pytest.fixture(scope="session")
def faulty_image(builder, images):
    return builder.derive("faulty", "tests/e2e/faulty.Dockerfile", "tests/e2e", images["trainer"])


@pytest.fixture
def faulty(settings, faulty_image, monkeypatch, tmp_path):
    """Settings of a training whose task fails; `fault` and its other options are still to be set."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return {
        **settings,
        "launch.nodes": 1,
        "launch.processes_per_node": 1,
        "task.kind": "faulty.task:Faulty",
        "task.tokenizer": "bytes",
        "launch.kubernetes.trainer_image": faulty_image,
        "launch.max_restarts_without_progress": 1,
        "launch.kubernetes.memory": "1Gi",
        "train.steps": 40,
    }
