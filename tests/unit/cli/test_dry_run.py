"""Dry runs: the jobs as text, and nothing else anywhere."""

import json
import shlex

import pytest
import yaml
from helpers.documents import opened_run

from kftrain import cli, config
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.spec import MLFLOW_RUN_ID_ENV, make_job
from kftrain.run.job_tasks import EVALUATION, TRAINING
from kftrain.run.paths import RunPaths
from kftrain.stages import resolve
from kftrain.tracking import mlflow_run

CLUSTER = """
run: {name: lm, storage_root: "memory://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch: {backend: pytorchjob, nodes: 2, kubernetes: {gpus_per_node: 4}}
"""
LOCAL = "run: {name: lm, storage_root: store}\nlaunch: {processes_per_node: 2}"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to be in, on a machine where nothing reaches a cluster or starts a process."""
    import kubernetes.client

    def refuse(*arguments, **options):
        raise AssertionError("a dry run does nothing")

    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(kubernetes.client.ApiClient, "call_api", refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)
    return folder


@pytest.fixture
def call(here, capfd, tmp_path):
    """Runs the command line; gives exit code, stdout and stderr."""

    def run_command(*arguments, text=None):
        if text is not None:
            (tmp_path / "c.yaml").write_text(text)
            arguments = (*arguments, "--config", f"{tmp_path}/c.yaml")
        with pytest.raises(SystemExit) as caught:
            cli.main(list(arguments))
        out, err = capfd.readouterr()
        return caught.value.code, out, err

    return run_command


def saved_run(folder, text):
    """A run that was opened and has an MLflow run."""
    resolved = resolve.anchor_paths(config.parse(text), folder)
    paths = opened_run(resolved, "lm-1").paths
    (folder / "store/runs/lm-1/tracking.json").write_text(json.dumps({"schema_version": 1, "mlflow_run_id": "m-7"}))
    assert mlflow_run.read_mlflow_run_id(paths) == "m-7"
    return resolved, paths


def everything_in(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_jobs_of_a_run_that_does_not_exist_are_those_that_the_launcher_would_create(call, here):
    code, out, err = call("run", "--dry-run", "--workdir", "new", text=CLUSTER)
    assert (code, err) == (0, "")
    resolved = config.parse(CLUSTER)
    paths = RunPaths.of("memory://bucket/root", "lm-dry-run")
    specs = [make_job(task, paths, resolved) for task in (TRAINING, EVALUATION)]
    assert list(yaml.safe_load_all(out)) == [KIND.build(spec, resolved) for spec in specs]
    assert "# train: 2 x 4 processes\n" in out and MLFLOW_RUN_ID_ENV in out
    assert not everything_in(here)


def test_a_dry_run_writes_nothing_into_the_storage_root(call, here):
    import fsspec

    call("run", "--dry-run", text=CLUSTER)
    assert not fsspec.filesystem("memory").exists("/bucket")
    code, out, _ = call("run", "--dry-run", "--workdir", str(here / "new"), text=LOCAL)
    assert code == 0 and f"{here}/new/store/runs/lm-dry-run" in out
    assert not everything_in(here)


def test_a_local_job_is_shown_as_the_command_of_its_worker(call, here):
    _, out, _ = call("run", "--dry-run", text=LOCAL)
    commands = [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]
    resolved = resolve.anchor_paths(config.parse(LOCAL), here)
    paths = RunPaths.of(resolved.run.storage_root, "lm-dry-run")
    specs = [make_job(task, paths, resolved) for task in (TRAINING, EVALUATION)]
    assert commands == [["kftrain", *spec.workers.arguments] for spec in specs]


def test_a_run_that_exists_is_only_read_and_keeps_its_mlflow_run(call, here):
    saved_run(here, LOCAL)
    before = everything_in(here)
    code, out, _ = call("train", "store/runs/lm-1", "--dry-run")
    assert code == 0 and f"{MLFLOW_RUN_ID_ENV}=m-7 kftrain worker --task train" in out
    assert "# The launcher adds" not in out
    code, out, _ = call("evaluate", "store/runs/lm-1", "--dry-run")
    assert code == 0 and "kftrain worker --task evaluate" in out and MLFLOW_RUN_ID_ENV not in out
    assert everything_in(here) == before


def test_the_job_of_a_run_that_exists_is_the_very_one_that_the_launcher_builds(call, here):
    mounted = "volumes: [{name: d, emptyDir: {}}]"
    text = CLUSTER.replace("memory://bucket/root", "store").replace("kubernetes: {", f"kubernetes: {{{mounted}, ")
    resolved, paths = saved_run(here, text)
    _, out, _ = call("train", paths.uri, "--dry-run")
    assert yaml.safe_load(out) == KIND.build(make_job(TRAINING, paths, resolved, "m-7"), resolved)


def test_a_resumed_run_is_shown_under_its_own_name(call, here):
    saved_run(here, LOCAL)
    _, out, _ = call("run", "--dry-run", "--resume", "store/runs/lm-1", "--set", "launch.processes_per_node=1")
    assert out.count("store/runs/lm-1 ") == 2 and "--processes 1" in out


@pytest.mark.parametrize(
    ("overrides", "code", "where"),
    [
        (["run.storage_root=/data"], 13, "run.storage_root"),
        (["launch.backend=local"], 13, "launch.nodes"),
        (["train.global_batch_size=1"], 10, "train.global_batch_size"),
    ],
)
def test_what_would_be_refused_is_refused(overrides, code, where, call):
    arguments = [part for override in overrides for part in ("--set", override)]
    found, out, err = call("run", "--dry-run", *arguments, text=CLUSTER)
    assert (found, out) == (code, "") and err.startswith(f"kftrain: error: {where}: ")


def test_a_run_that_is_not_there_cannot_be_shown(call):
    code, out, err = call("train", "nowhere", "--dry-run")
    assert (code, out) == (10, "") and "not a run" in err
