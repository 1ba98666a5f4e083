"""The exit handler on a cluster: it takes its own pipeline run's jobs away, and no other one's."""

import pytest
from helpers import pipeline_step
from helpers.documents import DIGITS
from helpers.fakes.api_server import ApiServer
from helpers.fakes.kube_namespace import NAME

from kftrain import config, tracking
from kftrain.core import storage
from kftrain.errors import DataError
from kftrain.launch import spec
from kftrain.launch.base import build_launcher
from kftrain.launch.kubernetes import client, control, labels, ownership
from kftrain.launch.kubernetes import workflow as workflow_module
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.launcher import ClusterLauncher
from kftrain.run.error import summarize_failure
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths
from kftrain.stages import resolve
from kftrain.stages.finish import FAILURE_REPORT, finish
from kftrain.tracking import mlflow_run

ON_CLUSTER = (
    "tracking.uri=http://mlflow:5000",
    "launch.backend=pytorchjob",
    "launch.nodes=2",
    "launch.kubernetes.volumes=[{name: data, persistentVolumeClaim: {claimName: runs}}]",
)
JOB_ID, RUN = "8f11", "tiny-8f11"
JOB = f"{RUN}-train"
KFP_LABEL = labels.KFP_RUN_LABEL


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The API server that the exit handler finds."""
    monkeypatch.setattr(client, "SERVICE_ACCOUNT", tmp_path / "none")
    monkeypatch.delenv(ownership.POD_NAME_ENV, raising=False)
    with ApiServer() as api_server:
        monkeypatch.setenv("KUBECONFIG", api_server.write_kubeconfig(tmp_path / "kubeconfig"))
        yield api_server


@pytest.fixture
def namespace(server):
    """What is in the cluster."""
    return server.namespace


@pytest.fixture
def own_workflow(namespace, monkeypatch):
    """This process is a step of a Workflow; the reference to it."""
    (owner,) = pipeline_step.become(namespace, monkeypatch)["metadata"]["ownerReferences"]
    return owner


def config_of(tmp_path, *overrides):
    return config.parse(DIGITS, [f"run.storage_root={tmp_path}", *ON_CLUSTER, *overrides])


@pytest.fixture(autouse=True)
def _open_mlflow_run(monkeypatch):
    monkeypatch.setattr(tracking, "read_status", lambda uri, mlflow_run_id: "RUNNING")


@pytest.fixture
def start_job(namespace, tmp_path):
    """Starts the training of the run and opens its folder; returns its paths."""

    def start(*overrides, kfp_run_id="", owner=None):
        resolved, paths = config_of(tmp_path, *overrides), RunPaths.of(str(tmp_path), RUN)
        resolve.keep_run(resolve.OpenedRun(resolved, paths), kfp_run_id or JOB_ID)
        namespace.create(
            "pytorchjobs", KIND.build(spec.make_job(TRAINING, paths, resolved), resolved, kfp_run_id, owner)
        )
        return paths

    return start


def test_the_exit_handler_deletes_the_job_that_bears_the_id_of_its_pipeline_run(start_job, namespace, tmp_path):
    paths = start_job(kfp_run_id=JOB_ID)
    assert build_launcher(config_of(tmp_path)).clean(paths, JOB_ID) == [f"job {JOB}"]
    assert namespace.jobs() == []


def test_the_job_of_another_pipeline_run_on_the_same_run_goes_on(start_job, namespace, tmp_path):
    """That one was refused, and has ended with its exit handler."""
    paths = start_job(kfp_run_id="kfp-a")
    assert build_launcher(config_of(tmp_path)).clean(paths, "kfp-b") == []
    assert build_launcher(config_of(tmp_path)).clean(paths, "") == []
    assert namespace.jobs() == [JOB]


def test_the_exit_handler_deletes_the_job_of_its_own_workflow_whatever_the_labels_say(
    start_job, own_workflow, namespace, tmp_path
):
    paths = start_job(kfp_run_id="another", owner=own_workflow)
    assert build_launcher(config_of(tmp_path)).clean(paths, JOB_ID) == [f"job {JOB}"]
    assert namespace.jobs() == []


def test_the_job_of_another_workflow_goes_on_even_without_a_label(start_job, own_workflow, namespace, tmp_path):
    paths = start_job(owner=pipeline_step.workflow(namespace, "other"))
    assert KFP_LABEL not in namespace.get("pytorchjobs", JOB)["metadata"]["labels"]
    assert build_launcher(config_of(tmp_path)).clean(paths, JOB_ID) == []
    assert namespace.jobs() == [JOB]


def test_a_job_of_no_pipeline_run_is_ours_where_it_has_our_configuration(start_job, namespace, tmp_path):
    """It is that of a launcher on a laptop, or in another namespace than the job."""
    paths = start_job()
    assert build_launcher(config_of(tmp_path, "launch.nodes=4")).clean(paths, JOB_ID) == []
    assert namespace.jobs() == [JOB]
    assert build_launcher(config_of(tmp_path)).clean(paths, JOB_ID) == [f"job {JOB}"]


def test_a_pipeline_run_that_was_refused_leaves_the_job_that_it_could_not_join(start_job, namespace, tmp_path):
    lines = []
    paths = start_job(kfp_run_id="kfp-a")
    other = config_of(tmp_path, "launch.nodes=4").to_yaml()
    storage.publish(paths.config, other)
    finish(other, "", paths.uri, "kfp-b", "FAILED", lines.append)
    assert namespace.jobs() == [JOB]
    finish(other, "", paths.uri, "kfp-a", "FAILED", lines.append)
    assert namespace.jobs() == [] and f"removed job {JOB}, which was never finished" in lines


@pytest.mark.parametrize(
    "message",
    [
        f"job {JOB} in namespace {NAME}: another launcher holds this run by now, and follows its job",
        f"job {JOB} in namespace {NAME}: a job with another specification holds this run: spec.x: 1 -> 2; wait for it",
        f"{RUN}: a newer attempt holds this run; nothing more is written by this one",
    ],
)
def test_a_pipeline_run_whose_run_another_one_holds_leaves_its_folder_and_its_mlflow_run(
    start_job, own_workflow, namespace, tmp_path, monkeypatch, message
):
    """The step said so in its termination message, which is all that Kubeflow keeps: in the Workflow's nodes."""
    (tmp_path / "account").touch()
    monkeypatch.setattr(workflow_module, "SERVICE_ACCOUNT", tmp_path / "account")
    monkeypatch.setattr(tracking, "finish_run", lambda *arguments: pytest.fail("it is another's"))
    paths = start_job(kfp_run_id="kfp-b")
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())
    node = {"type": "Pod", "phase": "Failed", "message": f"main: Error (exit code 1): kftrain exit code 17: {message}"}
    namespace.patch("workflows", own_workflow["name"], {"spec": {}, "status": {"nodes": {"n": node}}})
    outcome = finish("", "", paths.uri, "kfp-a", "FAILED", [].append)
    assert "holds this run" in outcome.markdown and "nothing needs to be done here" in outcome.markdown
    assert namespace.jobs() == [JOB] and not storage.exists(storage.join(paths.uri, FAILURE_REPORT))


@pytest.mark.parametrize("phrase", ["a newer attempt holds this run", "another launcher holds this run by now"])
def test_words_in_a_users_error_do_not_keep_finish_from_its_work(
    start_job, own_workflow, namespace, tmp_path, monkeypatch, phrase
):
    (tmp_path / "account").touch()
    monkeypatch.setattr(workflow_module, "SERVICE_ACCOUNT", tmp_path / "account")
    ended = []
    monkeypatch.setattr(tracking, "finish_run", lambda uri, run, status, tags=None: ended.append((run, status)))
    paths = start_job(kfp_run_id=JOB_ID)
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())
    message = f"main: Error (exit code 1): kftrain exit code 16: task.loss: ValueError: {phrase}"
    node = {"type": "Pod", "phase": "Failed", "message": message}
    namespace.patch("workflows", own_workflow["name"], {"spec": {}, "status": {"nodes": {"n": node}}})
    finish(config_of(tmp_path).to_yaml(), "", "", JOB_ID, "FAILED", [].append)
    assert namespace.jobs() == [] and ended == [("m-1", "FAILED")]
    assert storage.exists(storage.join(paths.uri, FAILURE_REPORT))


def test_a_fenced_pipeline_run_leaves_a_job_that_says_nothing_of_a_pipeline_run(
    start_job, own_workflow, namespace, tmp_path, monkeypatch
):
    """It is that of a laptop, with the very same configuration."""
    (tmp_path / "account").touch()
    monkeypatch.setattr(workflow_module, "SERVICE_ACCOUNT", tmp_path / "account")
    monkeypatch.setattr(control.ownership, "find_owner", lambda cluster: (None, ""))
    monkeypatch.setattr(workflow_module.ownership, "find_owner", lambda cluster: (own_workflow, ""))
    paths = start_job()
    message = "main: Error (exit code 1): kftrain exit code 17: another launcher holds this run"
    node = {"type": "Pod", "phase": "Failed", "message": message}
    namespace.patch("workflows", own_workflow["name"], {"spec": {}, "status": {"nodes": {"n": node}}})
    finish("", "", paths.uri, "kfp-a", "FAILED", [].append)
    assert namespace.jobs() == [JOB]


def test_a_job_that_another_launcher_adopts_while_it_is_being_deleted_goes_on(
    start_job, namespace, tmp_path, monkeypatch
):
    paths, delete = start_job(kfp_run_id=JOB_ID), JobClient.delete_job

    def be_slow(self, *arguments):
        monkeypatch.setattr(JobClient, "delete_job", delete)
        namespace.patch("pytorchjobs", JOB, {"metadata": {"labels": {KFP_LABEL: "kfp-b"}}})
        delete(self, *arguments)

    monkeypatch.setattr(JobClient, "delete_job", be_slow)
    assert build_launcher(config_of(tmp_path)).clean(paths, JOB_ID) == []
    assert namespace.jobs() == [JOB]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_run_that_is_terminated_while_storage_is_away_leaves_no_job(
    start_job, namespace, tmp_path, storage_is_away, is_resumed, monkeypatch
):
    """A run that is gone on with by name alone has its configuration in its folder."""
    monkeypatch.setattr(tracking, "finish_run", lambda *arguments: pytest.fail("which one?"))
    paths, lines = start_job(kfp_run_id=JOB_ID), []
    text, resume_run = ("", paths.uri) if is_resumed else (config_of(tmp_path).to_yaml(), "")
    storage_is_away()
    outcome = finish(text, "", resume_run, JOB_ID, "FAILED", lines.append)
    assert namespace.jobs() == []
    assert lines[0].startswith("warning: ") and " cannot be read: ConnectionError" in lines[0]
    assert outcome.run_uri == paths.uri and "Kubeflow calls it FAILED" in outcome.summary["result"]


def test_a_report_that_cannot_be_written_is_no_second_failure(start_job, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise ConnectionError("the endpoint does not answer")

    ended, lines = [], []
    paths = start_job(kfp_run_id=JOB_ID)
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())
    monkeypatch.setattr(tracking, "finish_run", lambda uri, run, status, tags=None: ended.append((run, status)))
    monkeypatch.setattr(storage, "publish", refuse)
    outcome = finish(config_of(tmp_path).to_yaml(), "", "", JOB_ID, "RUNNING", lines.append)
    assert "Kubeflow calls it RUNNING" in outcome.summary["result"]
    assert ended == [("m-1", "FAILED")]


def test_a_clean_up_that_fails_hides_no_failure(start_job, server, tmp_path, monkeypatch):
    """A cluster without the definition of PyTorchJobs answers 404."""
    ended, lines = [], []
    monkeypatch.setattr(tracking, "finish_run", lambda uri, run, status, tags=None: ended.append((run, status)))
    paths = start_job(kfp_run_id=JOB_ID)
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())
    storage.publish_json(paths.error, summarize_failure("train", DataError("a shard is damaged")).to_dict())
    server.fail("GET", "pytorchjobs", 404, times=float("inf"))
    outcome = finish(config_of(tmp_path).to_yaml(), "", "", JOB_ID, "FAILED", lines.append)
    assert "a shard is damaged" in outcome.summary["result"] and ended == [("m-1", "FAILED")]
    page = storage.read_text(storage.join(paths.uri, FAILURE_REPORT))
    for text in (page, outcome.html, outcome.markdown, str(outcome.summary["warnings"])):
        assert "clean-up failed" in text and "404" in text


def test_a_clean_up_that_fails_is_a_warning_in_the_report_of_a_run_that_succeeded(start_job, server, tmp_path):
    start_job(kfp_run_id=JOB_ID)
    server.fail("GET", "pytorchjobs", 404, times=float("inf"))
    outcome = finish(config_of(tmp_path).to_yaml(), "", "", JOB_ID, "COMPLETE", [].append)
    assert outcome.summary["result"] == "the run succeeded" and "clean-up failed" in outcome.html


def test_the_failure_report_is_there_before_the_clean_up_begins(start_job, tmp_path, monkeypatch):
    """Whatever happens then, as to a step that is killed."""

    def be_killed(*arguments):
        raise KeyboardInterrupt

    paths = start_job(kfp_run_id=JOB_ID)
    monkeypatch.setattr(ClusterLauncher, "clean", be_killed)
    with pytest.raises(KeyboardInterrupt):
        finish(config_of(tmp_path).to_yaml(), "", "", JOB_ID, "FAILED", [].append)
    assert storage.exists(storage.join(paths.uri, FAILURE_REPORT))


def test_nobody_is_told_to_go_on_with_a_run_that_was_refused_before_it_was_there(namespace, tmp_path, monkeypatch):
    monkeypatch.setenv(ownership.POD_NAME_ENV, "step")
    outcome = finish(config_of(tmp_path).to_yaml(), "", "", JOB_ID, "FAILED", [].append)
    assert "resume_run" not in outcome.markdown and "clone the run in the Kubeflow UI" in outcome.markdown
