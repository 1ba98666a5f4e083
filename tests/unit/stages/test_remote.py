"""The first step refuses what `kftrain submit` refuses, and what this cluster cannot do."""

import os

import pytest
from helpers.fakes.api_server import ApiServer

from kftrain import config
from kftrain.errors import LaunchError
from kftrain.launch.kubernetes import client, ownership
from kftrain.stages import preflight
from kftrain.stages.shard import shard_from_pipeline

CONFIG = """
run: {name: lm, storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch: {backend: pytorchjob, nodes: 2}
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The API server of the cluster whose step this process is."""
    monkeypatch.setattr(client, "SERVICE_ACCOUNT", tmp_path / "none")
    monkeypatch.setenv(ownership.POD_NAME_ENV, "step")
    monkeypatch.chdir(tmp_path)
    with ApiServer() as api_server:
        monkeypatch.setenv("KUBECONFIG", api_server.write_kubeconfig(tmp_path / "kubeconfig"))
        yield api_server


@pytest.fixture
def namespace(server):
    """What is in it."""
    return server.namespace


def refused(text, knobs=None, values=None):
    lines = []
    with pytest.raises(LaunchError) as caught:
        shard_from_pipeline(text, knobs or {}, "", "8f11", lines.append, values=values)
    assert lines[-1].startswith("error "), "it is announced, for the pod's termination message"
    return caught.value.line


def test_a_run_that_is_started_from_the_form_with_the_defaults_is_refused_at_once(namespace, tmp_path):
    assert refused("").startswith("launch.backend: the pipeline's steps have neither torch nor a GPU")
    assert not (tmp_path / "runs").exists() and not (tmp_path / "shards").exists()


@pytest.mark.parametrize(
    ("knobs", "values", "where"),
    [
        ({"storage_root": "/tmp/root"}, {}, "run.storage_root"),
        ({}, {"run": {"storage_root": "."}}, "run.storage_root"),
        ({}, {"tracking": {"uri": "sqlite:///mlflow.db"}}, "tracking.uri"),
        ({"source": "./texts"}, {}, "data.source"),
        ({}, {"tracking": {"uri": "http://ana:hunter2@mlflow:5000"}}, "tracking.uri"),
    ],
)
def test_the_first_step_refuses_what_submit_refuses(namespace, knobs, values, where):
    line = refused(CONFIG, knobs, values)
    assert line.startswith(f"{where}: ") and "hunter2" not in line


def test_a_cluster_without_pytorchjobs_is_known_before_the_first_shard(namespace):
    namespace.has_operator = False
    assert "this cluster has no PyTorchJobs (kubeflow.org/v1)" in refused(CONFIG)


def test_an_account_that_may_create_none_is_known_before_the_first_shard(namespace):
    namespace.forbidden = {"create", "delete"}
    assert "may not create, delete PyTorchJobs" in refused(CONFIG)


def test_who_may_do_everything_is_let_through(namespace):
    preflight.require_from_here(config.parse(CONFIG))


def test_an_api_server_that_reviews_no_access_is_no_reason_to_refuse(server):
    server.fail("POST", "selfsubjectaccessreviews", 403, times=float("inf"))
    preflight.require_from_here(config.parse(CONFIG))


def test_a_folder_on_a_volume_of_the_pod_is_no_folder_of_one_machine(namespace, monkeypatch):
    """Who builds a pipeline of their own may mount a volume in every step."""
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == "/data")
    preflight.require_from_here(config.parse(CONFIG, ["run.storage_root=/data/root", "data.source=/data/texts"]))
    with pytest.raises(LaunchError, match=r"run\.storage_root"):
        preflight.require_from_here(config.parse(CONFIG, ["run.storage_root=/other/root"]))


def test_on_a_laptop_a_folder_is_as_good_as_an_object_store(namespace, monkeypatch):
    monkeypatch.delenv(ownership.POD_NAME_ENV)
    preflight.require_from_here(config.parse("run: {storage_root: /data}"))
