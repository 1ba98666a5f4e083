"""The compiled pipeline, as the Kubeflow backend gets it."""

from pathlib import Path

import pytest
import yaml

from kftrain.components.images import STEPS_IMAGE
from kftrain.pipelines.compile import compiled
from kftrain.pipelines.train import SECRETS, train_pipeline
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


def test_the_compiled_pipeline_is_the_golden_file(text):
    assert text == GOLDEN.read_text(), f"if the change is meant: kftrain compile -o {GOLDEN}"


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
    for executor in executors.values():
        assert executor["securityContext"] == {"runAsNonRoot": True, "runAsUser": "1000"}
        found = {secret["secretName"]: secret for secret in executor["secretAsEnv"]}
        assert found.keys() == SECRETS.keys()
        assert all(secret["optional"] for secret in found.values())


def test_finished_workflows_go_and_a_stuck_one_ends(platform):
    config = platform["pipelineConfig"]
    names = ("resourceTtlOnCompletion", "resourceTtlOnSuccess", "resourceTtlOnFailure", "activeDeadlineSeconds")
    assert all(config[name] > 0 for name in names)


def test_the_graph_is_one_chain_inside_one_exit_handler(spec):
    assert spec["root"]["dag"]["tasks"].keys() == {"exit-handler-1", "finish"}
    inner = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    depends = {name: task.get("dependentTasks", []) for name, task in inner.items()}
    assert depends == {"shard": [], "train": ["shard"], "evaluate": ["train"], "register": ["evaluate"]}
    finish = spec["root"]["dag"]["tasks"]["finish"]
    assert finish["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_every_parameter_is_used_and_defaults_to_leaving_the_configuration_alone(spec):
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert parameters.keys() == KNOBS.keys() | {"config", "resume_run"}
    assert all(parameter["defaultValue"] in ("", 0) for parameter in parameters.values())
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
