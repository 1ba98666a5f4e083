"""The compiled pipeline, as the Kubeflow backend gets it."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, create_autospec

import kfp
import pytest
import yaml
from helpers import crds

from kftrain import __version__, cli
from kftrain.client import pipeline_process
from kftrain.components.images import STEPS_IMAGE
from kftrain.core import storage
from kftrain.pipelines.compile import compiled, manifests, version_name
from kftrain.pipelines.train import SECRETS, train_pipeline
from kftrain.stages.outcome import Outcome
from kftrain.stages.resolve import KNOBS

GOLDEN = Path(__file__).parents[1] / "golden" / "train_pipeline.yaml"
STEPS = {"shard", "train", "evaluate", "register", "finish"}


@pytest.fixture(scope="module")
def text():
    return compiled()


@pytest.fixture(scope="module")
def spec(text):
    return next(yaml.safe_load_all(text))


@pytest.fixture(scope="module")
def platform(text):
    return list(yaml.safe_load_all(text))[1]["platforms"]["kubernetes"]


def containers(spec):
    return {label.removeprefix("exec-"): e["container"] for label, e in spec["deploymentSpec"]["executors"].items()}


def all_tasks(spec):
    dags = [spec["root"], *spec["components"].values()]
    return {name: task for dag in dags for name, task in dag.get("dag", {}).get("tasks", {}).items()}


def read_golden(path):
    """What the file would be had the installed kfp written it: kfp notes its own version."""
    return re.sub(r"(?<=^sdkVersion: kfp-).*$", kfp.__version__, path.read_text(), flags=re.MULTILINE)


def test_the_compiled_pipeline_is_the_golden_file(text):
    assert text == read_golden(GOLDEN), f"if the change is meant: kftrain compile -o {GOLDEN}"


def test_the_compiled_promotion_is_the_golden_file():
    golden = GOLDEN.with_name("promote_pipeline.yaml")
    text = compiled("promote")
    assert text == read_golden(golden), f"if the change is meant: kftrain compile --pipeline promote -o {golden}"
    document = next(yaml.safe_load_all(text))
    inputs = document["root"]["inputDefinitions"]["parameters"]
    assert inputs.keys() == {"version", "reason", "config", "model", "decline"}
    assert inputs["version"]["parameterType"] == "NUMBER_INTEGER" and inputs["model"]["isOptional"]


def test_compiling_twice_gives_the_same_bytes(text):
    assert compiled() == text


def test_no_step_installs_anything_when_it_starts(text):
    assert "pip install" not in text and "pip3" not in text


def test_every_step_runs_in_the_steps_image(spec):
    assert {name: container["image"] for name, container in containers(spec).items()} == dict.fromkeys(
        STEPS, STEPS_IMAGE
    )


def test_no_step_is_cached_by_kubeflow(spec):
    tasks = {name: task for name, task in all_tasks(spec).items() if name in STEPS}
    assert tasks.keys() == STEPS
    assert all(not task["cachingOptions"].get("enableCache") for task in tasks.values())


def test_every_step_logs_at_once_and_asks_for_resources(spec):
    for container in containers(spec).values():
        assert {"name": "PYTHONUNBUFFERED", "value": "1"} in container["env"]
        assert container["resources"].keys() >= {"resourceCpuRequest", "resourceMemoryRequest"}


def test_no_step_runs_as_root_and_secrets_are_optional(platform):
    executors = platform["deploymentSpec"]["executors"]
    assert {label.removeprefix("exec-") for label in executors} == STEPS
    for label, executor in executors.items():
        assert executor["securityContext"] == {"runAsNonRoot": True, "runAsUser": "1000"}
        found = {secret["secretName"]: secret for secret in executor["secretAsEnv"]}
        alert = {"kftrain-alert"} if label == "exec-finish" else set()  # its URL is for the one step that alerts
        assert found.keys() == SECRETS.keys() | alert
        assert all(secret["optional"] for secret in found.values())


def test_a_step_that_only_watches_a_job_asks_for_little(spec):
    for name in ("train", "evaluate"):
        resources = containers(spec)[name]["resources"]
        assert (resources["resourceCpuRequest"], resources["resourceMemoryRequest"]) == ("100m", "512Mi")


def test_what_a_launcher_asks_for_can_be_set(tmp_path):
    command = ["compile", "-o", f"{tmp_path}/p.yaml", "--launcher-cpu", "250m", "--launcher-memory", "1Gi"]
    subprocess.run([sys.executable, "-m", "kftrain", *command], capture_output=True, check=True)
    found = containers(next(yaml.safe_load_all((tmp_path / "p.yaml").read_text())))
    for name in ("train", "evaluate"):
        assert found[name]["resources"]["resourceCpuRequest"] == "250m"
        assert found[name]["resources"]["resourceMemoryRequest"] == "1Gi"


@pytest.mark.parametrize("quantity", ["lots", "1ki", "1.5.2Gi"])
def test_what_is_no_quantity_is_refused(tmp_path, capfd, quantity):
    assert call("-o", f"{tmp_path}/p.yaml", "--launcher-memory", quantity) == 10
    assert "--launcher-memory" in capfd.readouterr().err


OF_BEFORE = GOLDEN.with_name("train_pipeline_0_2.yaml")
"""The pipeline as release 0.2 compiles it. A recurring run holds such a text, and the tag of an image."""

STAGES = {
    "shard": "kftrain.stages.shard.shard_from_pipeline",
    "train": "kftrain.stages.train.train",
    "evaluate": "kftrain.stages.evaluate.evaluate",
    "register": "kftrain.stages.register.register",
    "finish": "kftrain.stages.finish.finish",
}


@pytest.mark.parametrize("step", sorted(STAGES))
def test_a_pipeline_that_was_compiled_before_still_calls_what_there_is(step, monkeypatch, tmp_path):
    container = containers(next(yaml.safe_load_all(OF_BEFORE.read_text())))[step]
    module, _, function = STAGES[step].rpartition(".")
    stage = create_autospec(getattr(importlib.import_module(module), function), return_value=Outcome("uri", {}))
    monkeypatch.setattr(STAGES[step], stage)
    scope = {}
    exec(container["command"][-1], scope)
    paths = {name: f"{tmp_path}/{name}" for name in inspect.signature(scope[step]).parameters}
    arguments = {name: MagicMock(path=path, state="FAILED") for name, path in paths.items()}
    if "next_step" in arguments:  # the only output that is given as a path
        arguments["next_step"] = paths["next_step"]
    assert scope[step](**arguments) in ("uri", None)
    stage.assert_called_once()


def test_finished_workflows_go_and_a_stuck_one_ends(platform):
    config = platform["pipelineConfig"]
    names = ("resourceTtlOnCompletion", "resourceTtlOnSuccess", "resourceTtlOnFailure", "activeDeadlineSeconds")
    assert all(config[name] > 0 for name in names)


def test_the_graph_is_one_chain_inside_one_exit_handler(spec):
    assert spec["root"]["dag"]["tasks"].keys() == {"exit-handler-1", "finish"}
    assert depends_in(spec, "exit-handler-1") == {"shard": [], "condition-2": ["shard"]}
    assert depends_in(spec, "condition-2") == {"train": [], "evaluate": ["train"], "register": ["evaluate"]}
    finish = spec["root"]["dag"]["tasks"]["finish"]
    assert finish["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def depends_in(spec, group):
    tasks = spec["components"][f"comp-{group}"]["dag"]["tasks"]
    return {name: task.get("dependentTasks", []) for name, task in tasks.items()}


def pods(spec, dag, next_step):
    """Names of the pods that Kubeflow starts: a driver for each group and each step, and for a step one that works.

    The driver of a group reads its condition; where that is false it is the only pod of the group.
    """
    found = []
    for name, task in dag["tasks"].items():
        condition = task.get("triggerPolicy", {}).get("condition")
        component = spec["components"][task["componentRef"]["name"]]
        found.append(f"{name}-driver")
        if condition is not None and not eval(condition.replace(pipeline_process.NEXT_STEP, repr(next_step))):
            continue
        found += pods(spec, component["dag"], next_step) if "dag" in component else [name]
    return found


def test_a_run_that_has_nothing_to_do_works_in_its_first_step_and_in_the_exit_handler(spec):
    """With the driver of the whole these are 7 pods, one after another, where a run that trains has 13."""
    started = {next_step: pods(spec, spec["root"]["dag"], next_step) for next_step in ("train", "finish")}
    working = {next_step: {name for name in names if name in STEPS} for next_step, names in started.items()}
    assert working == {"train": STEPS, "finish": {"shard", "finish"}}
    assert {next_step: 1 + len(names) for next_step, names in started.items()} == {"train": 13, "finish": 7}


@pytest.mark.parametrize("next_step", ["train", "finish"])
def test_the_first_step_says_what_is_next_where_kubeflow_reads_it(spec, tmp_path, monkeypatch, next_step):
    monkeypatch.setattr(STAGES["shard"], lambda *arguments, **named: Outcome("uri", {}, next_step=next_step))
    scope = {}
    exec(containers(spec)["shard"]["command"][-1], scope)
    names = inspect.signature(scope["shard"]).parameters
    outputs = dict.fromkeys(names, MagicMock(path=f"{tmp_path}/artifact")) | {
        "next_step": f"{tmp_path}/outputs/next_step"
    }
    assert scope["shard"](**outputs) == "uri"
    assert Path(outputs["next_step"]).read_text() == next_step


def test_every_parameter_is_used_and_defaults_to_leaving_the_configuration_alone(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters.keys() == KNOBS.keys() | {"config", "config_json", "resume_run"}
    assert all(parameter["defaultValue"] in ("", 0, {}) for parameter in parameters.values())
    types = {name: parameter["parameterType"] for name, parameter in parameters.items()}
    assert (types["config"], types["config_json"]) == ("STRING", "STRUCT")  # one line, and a JSON editor, in the form
    used = str(spec["root"]["dag"]) + str(spec["components"]["comp-exit-handler-1"])
    assert all(f"pipelinechannel--{name}" in used for name in parameters)


def test_a_component_is_a_doorway_of_at_most_15_lines(spec):
    for name, container in containers(spec).items():
        body = container["command"][-1].split('"""')[-1].strip().splitlines()
        assert 0 < len(body) <= 15, name
        assert any("from kftrain.stages" in line for line in body), name


def test_the_pipeline_has_a_description_for_the_ui():
    assert train_pipeline.name == "kftrain-train"
    assert train_pipeline.description


def call(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(["compile", *arguments])
    return caught.value.code


def test_a_version_is_named_by_the_release_and_the_content(text):
    assert version_name() == f"kftrain-train-{__version__}-{storage.sha256_text(text)[:8]}"
    assert version_name("team.lm").startswith("team.lm-")


def test_another_image_is_another_version():
    code = (
        "from kftrain.pipelines.compile import *; text = compiled();"
        "print(version_name(), text.count('image: r/steps:7') == text.count('value: r/steps:7') == 5)"
    )
    environment = {"KFTRAIN_STEPS_IMAGE": "r/steps:7", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    name, in_there = done.stdout.split()
    assert in_there == "True" and re.fullmatch(f"kftrain-train-{re.escape(__version__)}-[0-9a-f]{{8}}", name)
    assert name != version_name()


def test_the_kubernetes_resources_hold_the_pipeline_and_its_version(spec, platform, capfd):
    assert call("--k8s-manifest", "-o", "-", "--namespace", "team") == 0
    out, err = capfd.readouterr()
    pipeline, version = yaml.safe_load_all(out)
    assert pipeline["metadata"] == {"name": "kftrain-train", "namespace": "team"}
    assert version["metadata"] == {"name": version_name(), "namespace": "team"}
    assert version["spec"]["pipelineName"] == "kftrain-train"
    assert version["spec"]["pipelineSpec"] == spec
    assert version["spec"]["platformSpec"] == {"platforms": {"kubernetes": platform}}
    assert "--pipelinesStoreKubernetes" in err and "kftrain submit" in err


def test_the_kubernetes_resources_are_the_same_bytes_every_time():
    assert manifests("team") == manifests("team") != manifests()
    assert all("namespace" not in document["metadata"] for document in yaml.safe_load_all(manifests()))


def test_the_kubernetes_resources_are_valid_against_kubeflows_definitions():
    pipeline, version = yaml.safe_load_all(manifests("team"))
    crds.validate(pipeline, "pipelines.kubeflow.org_pipelines.yaml")
    crds.validate(version, "pipelines.kubeflow.org_pipelineversions.yaml")


def test_the_resources_may_have_other_names(tmp_path, capfd):
    names = ["--pipeline-name", "lm", "--version-name", "lm-7"]
    assert call("--k8s-manifest", "-o", f"{tmp_path}/m.yaml", *names) == 0
    pipeline, version = yaml.safe_load_all((tmp_path / "m.yaml").read_text())
    assert (pipeline["metadata"]["name"], version["metadata"]["name"]) == ("lm", "lm-7")
    assert version["spec"]["pipelineName"] == "lm"
    (derived,) = [d for d in yaml.safe_load_all(manifests(pipeline_name="lm")) if d["kind"] == "PipelineVersion"]
    assert derived["metadata"]["name"] == version_name("lm")
    assert "kubectl apply" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--namespace", "team"], 2, "--namespace needs --k8s-manifest"),
        (["--k8s-manifest", "--namespace", "my.team"], 10, "--namespace"),
        (["--k8s-manifest", "--pipeline-name", "My_Pipeline"], 10, "--pipeline-name"),
        (["--k8s-manifest", "--version-name", "v" * 254], 10, "--version-name"),
    ],
)
def test_names_that_kubernetes_would_refuse_are_refused(arguments, code, part, capfd, tmp_path):
    assert call(*arguments, "-o", f"{tmp_path}/m.yaml") == code
    assert part in capfd.readouterr().err and not list(tmp_path.iterdir())
