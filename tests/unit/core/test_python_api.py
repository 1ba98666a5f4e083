"""`import kftrain`: what it gives, what it costs, and that it does what the commands do."""

import inspect
import os
import subprocess
import sys
import typing
from types import SimpleNamespace

import pytest
import yaml
from helpers.documents import finished_run, sharded_run
from helpers.fakes import kfp_server

import kftrain
from kftrain import api
from kftrain.errors import CheckpointError, ConfigError, DataError, LaunchError
from kftrain.kubeflow.client import Connection

ENDPOINTS = [
    ("KUBERNETES_SERVICE_HOST", "10.0.0.1", "http://ml-pipeline.kubeflow.svc.cluster.local:8888"),
    ("KF_PIPELINES_ENDPOINT", "https://named.example", "https://named.example"),
]
"""Variable, its value, and where a run is then submitted to: in a pod to its own Kubeflow, unless another is named."""

CLUSTER = """
run: {name: lm, storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch: {backend: pytorchjob}
"""


def test_importing_it_imports_no_heavy_library():
    heavy = "torch", "kfp", "mlflow", "kubernetes", "pandas", "pydantic", "yaml"
    code = f"import sys, kftrain; dir(kftrain); print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", [name for name in kftrain.__all__ if name != "CompletedRun"])
def test_every_function_is_typed_documented_and_no_folder_has_its_name(name):
    function = getattr(kftrain, name)
    assert function is getattr(api, name) and "Raises" in inspect.getdoc(function)
    hints = typing.get_type_hints(
        function,
        {**vars(api), **dict.fromkeys(("OpenedDataset", "Task", "TaskConfig", "LoadedExport"), object)},
        {"SubmittedRun": object},
    )
    assert hints.keys() == {*inspect.signature(function).parameters, "return"}
    with pytest.raises(ModuleNotFoundError):
        __import__(f"kftrain.{name}")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="load_konfig"):
        kftrain.load_konfig  # noqa: B018


def test_a_configuration_takes_files_and_overrides(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("train: {steps: 7}")
    assert kftrain.load_config(path).train.steps == 7
    assert kftrain.load_config(str(path), ["train.steps=9"]).train.steps == 9
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        kftrain.load_config(path, ["train.step=9"])


def test_a_pipeline_is_compiled_with_an_image_and_without_it_again(tmp_path):
    usual = kftrain.compile_pipeline()
    own = kftrain.compile_pipeline(
        tmp_path / "p.yaml", steps_image="registry.example/mine:1", launcher_cpu="250m", launcher_memory="1Gi"
    )
    assert (tmp_path / "p.yaml").read_text() == own
    images = {step["container"]["image"] for step in executors(own)}
    assert images == {"registry.example/mine:1"}
    asked = {name: step["container"]["resources"] for name, step in named_executors(own).items()}
    launchers = [asked[f"exec-{name}"] for name in ("train", "evaluate")]
    assert [(each["resourceCpuRequest"], each["resourceMemoryRequest"]) for each in launchers] == [("250m", "1Gi")] * 2
    assert {step["container"]["image"] for step in executors(usual)} == {f"kftrain-steps:{kftrain.__version__}"}
    assert kftrain.compile_pipeline() == usual
    with pytest.raises(ConfigError, match="not a quantity"):
        kftrain.compile_pipeline(launcher_memory="much")


def named_executors(text):
    return next(iter(yaml.safe_load_all(text)))["deploymentSpec"]["executors"]


def executors(text):
    return named_executors(text).values()


@pytest.fixture
def server(monkeypatch, tmp_path):
    import kfp

    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", f"{tmp_path}/context.json")
    with kfp_server.Server() as started:
        yield started


def test_a_run_is_submitted_and_followed(server, tmp_path, capfd):
    (tmp_path / "c.yaml").write_text(CLUSTER)
    config = kftrain.load_config(tmp_path / "c.yaml")
    server.script = [kfp_server.run("RUNNING", {"shard": "RUNNING"}), kfp_server.run("SUCCEEDED")]
    run = kftrain.submit_pipeline(config, host=server.url, steps_image="mine:2", run_name="from a notebook")
    assert run.id == kfp_server.RUN_ID and run.url == f"{server.url}/#/runs/details/{run.id}"
    assert run.run_uri.startswith("s3://bucket/root/runs/lm-")
    assert server.runs[0]["display_name"] == "from a notebook"
    assert {step["container"]["image"] for step in executors(server.versions[0]["text"])} == {"mine:2"}
    from kftrain.client import submit

    submit.POLL_SECONDS, before = 0.01, submit.POLL_SECONDS
    try:
        assert run.wait(timeout_seconds=600) == "the run succeeded"
    finally:
        submit.POLL_SECONDS = before
    assert capfd.readouterr().err.splitlines()[-1] == "shard: running"


def test_what_cannot_run_on_a_cluster_is_not_submitted(monkeypatch):
    with pytest.raises(LaunchError, match="pytorchjob"):
        kftrain.submit_pipeline(host="http://unused:1")
    for name in ("KF_PIPELINES_ENDPOINT", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    config = kftrain.load_config(
        None, ["run.storage_root=s3://b/r", "tracking.uri=http://m:5000", "launch.backend=pytorchjob"]
    )
    with pytest.raises(ConfigError, match="which Kubeflow Pipelines"):
        kftrain.submit_pipeline(config)


def test_a_pod_finds_its_own_kubeflow(monkeypatch):
    from kftrain.kubeflow import client

    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert client.find_in_cluster_host() == "http://ml-pipeline.kubeflow.svc.cluster.local:8888"


class FakePipeline:
    """A pipeline that tells which run it works on, and ends."""

    messages = ()
    code = 0
    stop_code = 0
    killed = False

    def __init__(self, *_):
        from kftrain.process import channel

        for kind, content in self.messages:
            assert channel.tell(kind, content)

    def follow(self, on_line):
        on_line("kftrain| 3 shards\n")
        return self.code


def test_a_run_here_gives_what_its_folder_says(tmp_path, monkeypatch):
    paths, resolved = finished_run(tmp_path)
    monkeypatch.setattr(FakePipeline, "messages", [("run", paths.uri)])
    monkeypatch.setattr("kftrain.client.local_run.PipelineProcess", FakePipeline)
    run = kftrain.run_pipeline(resolved, workdir=tmp_path)
    assert run.uri == paths.uri and run.config == resolved
    assert run.metrics == {name: found.value for name, found in run.evaluation.metrics.items()} != {}
    assert kftrain.CompletedRun.read(paths.uri) == run


def test_a_run_here_that_fails_raises_the_error_of_the_step(tmp_path, monkeypatch):
    error = {**DataError("there is no source", where="data.source").to_dict(), "stage": "shard"}
    monkeypatch.setattr(FakePipeline, "messages", [("error", error)])
    monkeypatch.setattr(FakePipeline, "code", 1)
    monkeypatch.setattr("kftrain.client.local_run.PipelineProcess", FakePipeline)
    with pytest.raises(DataError, match="there is no source"):
        kftrain.run_pipeline(workdir=tmp_path)


def test_a_dataset_is_opened_by_its_run_its_folder_or_its_manifest(tmp_path):
    paths, _, shards = sharded_run(tmp_path)
    by_run = kftrain.open_dataset(paths.uri, "validation")
    arrays, _ = by_run.read_range(0, 2)
    assert len(next(iter(arrays.values()))) == 2
    for uri in (shards.manifest_uri, shards.manifest_uri.rsplit("/", 1)[0]):
        assert kftrain.open_dataset(uri, "validation").num_samples == by_run.num_samples
    assert kftrain.open_dataset(paths.uri).num_samples > by_run.num_samples
    with pytest.raises(ConfigError, match="one of: train, validation"):
        kftrain.open_dataset(paths.uri, "test")


def test_a_run_that_is_not_complete_has_no_export(tmp_path):
    paths, _, _ = sharded_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"COMPLETE\.json is missing"):
        kftrain.load_export(paths.uri)


def recorded(told, name, answer):
    """A function that keeps what it is called with."""

    def call(*arguments, **named):
        told[name] = (*arguments, *named.values())
        return answer

    return call


def test_submit_passes_on_all_that_it_is_told(monkeypatch):
    told = {}
    monkeypatch.setattr("kftrain.client.local_run.place_run", recorded(told, "placed", ("placed", "run-7")))
    monkeypatch.setattr("kftrain.stages.preflight.require_remote", recorded(told, "remote", None))
    monkeypatch.setattr("kftrain.kubeflow.client.Pipelines", lambda connection: connection)
    monkeypatch.setattr("kftrain.client.submit.build_submission", recorded(told, "built", "submission"))
    monkeypatch.setattr("kftrain.client.submit.submit", recorded(told, "send", "sent"))
    names = {"namespace": "mine", "resume": "run-7", "experiment": "e", "run_name": "n"}
    assert kftrain.submit_pipeline(host="https://kf.example", **names, steps_image="own:1", ca_file="/ca.pem") == "sent"
    assert told["placed"][3:] == ("run-7", True) and told["remote"] == ("placed",)
    assert told["built"] == ("placed", "run-7", "https://kf.example", "e", "n", "own:1")
    connection = Connection("https://kf.example", "mine", "KFP_EXISTING_TOKEN", "/ca.pem")
    assert told["send"] == (connection, "submission", "placed", "run-7")
    for variable, value, url in ENDPOINTS:
        monkeypatch.setenv(variable, value)
        kftrain.submit_pipeline(kftrain.load_config(), resume="run-8")
        assert told["built"][2] == url
    assert told["placed"][3:] == ("run-8", False), "a configuration that is given replaces the run's own"


def test_a_run_here_starts_where_and_from_what_it_is_told(tmp_path, monkeypatch):
    told = {}
    monkeypatch.setattr("kftrain.client.local_run.place_run", recorded(told, "placed", ("placed", "run-7")))
    monkeypatch.setattr("kftrain.client.local_run.run_here", recorded(told, "run", SimpleNamespace()))
    for config, keeps in ((None, True), (kftrain.load_config(), False)):
        with pytest.raises(AttributeError):
            kftrain.run_pipeline(config, workdir=tmp_path / "there", resume="run-7")
        assert told["placed"][2:] == (tmp_path / "there", "run-7", keeps)
        assert told["run"][:3] == ("placed", "run-7", tmp_path / "there")


def test_an_export_is_read_from_its_own_root_by_its_digest_with_the_kinds_that_are_trusted(tmp_path, monkeypatch):
    told = {}
    paths, resolved = finished_run(tmp_path)
    monkeypatch.setattr("kftrain.checkpoint.export.load_export", recorded(told, "load", "loaded"))
    monkeypatch.setenv("KFTRAIN_TRUSTED_KINDS", "listed:Model")
    monkeypatch.setenv("KFTRAIN_TRUSTED_ROOTS", "/elsewhere")
    monkeypatch.chdir(tmp_path)
    relative = os.path.relpath(paths.uri, tmp_path)
    assert kftrain.load_export(relative, trusted_kinds=["mine:Model"]) == "loaded"
    uri, digest, trust = told["load"]
    assert (uri, digest) == (paths.export("c" * 64), "e" * 64)
    assert trust.kinds == {"listed:Model", "mine:Model"}
    assert set(trust.roots) == {resolved.run.storage_root, "/elsewhere"}
    assert kftrain.CompletedRun.read(relative).uri == paths.uri
