"""`kftrain gc` ends the MLflow runs of pipeline runs that were deleted, and no other ones; with a real MLflow."""

import mlflow
import pytest
from click.testing import CliRunner
from helpers.fakes.api_server import ApiServer
from helpers.fakes.kube_namespace import NAME
from helpers.launching import job_client

from kftrain import config, tracking
from kftrain.cli.jobs import gc_command
from kftrain.launch.kubernetes import client
from kftrain.launch.kubernetes.workflow import PLACE_TAG, RUN_TAG, URL_TAG, WORKFLOW_TAG, name_cluster_place
from kftrain.stages import garbage
from kftrain.tracking import DatasetLineage

LINEAGE = DatasetLineage(name="texts", digest="d" * 64, uri="s3://b/m.json")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "SERVICE_ACCOUNT", tmp_path / "none")
    with ApiServer() as api_server:
        monkeypatch.setenv("KUBECONFIG", api_server.write_kubeconfig(tmp_path / "kubeconfig"))
        yield api_server


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """One database for all: every test has another cluster."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def start(server, uri):
    """Starts the MLflow run of a training that a Workflow works on; returns its id."""

    def call(name, workflow="flow", place=None):
        place = name_cluster_place(job_client()) if place is None else place
        tags = {RUN_TAG: "0b1c-2d3e", URL_TAG: "", WORKFLOW_TAG: workflow, PLACE_TAG: place}
        return tracking.start_run(config.parse("", [f"tracking.uri={uri}"]), name, LINEAGE, tags)

    return call


def collect(uri, *arguments):
    done = CliRunner().invoke(gc_command, ["--tracking-uri", uri, "-n", NAME, *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_mlflow_run_of_a_deleted_pipeline_run_is_ended(server, start, uri):
    deleted, other = start("r-1"), start("r-2", place="another-cluster/train")
    assert "would end the MLflow run of r-1: its pipeline run flow was deleted" in collect(uri, "--dry-run")
    assert tracking.read_status(uri, deleted) == "RUNNING"
    assert "ended the MLflow run of r-1" in collect(uri)
    run = mlflow.MlflowClient(tracking_uri=uri).get_run(deleted)
    assert run.info.status == "KILLED" and "was deleted" in run.data.tags["kftrain.error"] and run.info.end_time
    assert tracking.read_status(uri, other) == "RUNNING"


@pytest.mark.parametrize(("phase", "ended"), [("Failed", True), ("Succeeded", True), ("Running", False), ("", False)])
def test_that_of_a_pipeline_run_that_is_there_is_ended_once_it_is_over(phase, ended, server, start, uri):
    server.namespace.create("workflows", {"metadata": {"name": "flow"}, "status": {"phase": phase}})
    start("r-1")
    assert [orphan.run_id for orphan in garbage.close_orphans([job_client()], uri)] == (["r-1"] if ended else [])


def test_that_of_a_run_with_a_job_goes_on(server, start, uri):
    start("r-1")
    job = {"metadata": {"name": "r-1-train", "labels": {"kftrain.io/run": "r-1"}}}
    server.namespace.create("pytorchjobs", job)
    assert garbage.close_orphans([job_client()], uri) == []


def test_who_may_not_read_workflows_ends_nothing(server, start, uri):
    server.fail("GET", "/workflows/", 403, times=float("inf"))
    start("r-1")
    assert garbage.close_orphans([job_client()], uri) == []


def test_a_run_that_goes_on_on_a_laptop_is_no_pipeline_runs_any_more(server, start, uri):
    start("r-1")
    empty = dict.fromkeys((RUN_TAG, URL_TAG, WORKFLOW_TAG, PLACE_TAG), "")
    tracking.start_run(config.parse("", [f"tracking.uri={uri}"]), "r-1", LINEAGE, empty)
    assert garbage.close_orphans([job_client()], uri) == []
