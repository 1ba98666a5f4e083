"""The TrainJob as data: with the runtime of the manifests its pods are those of every other kind of job."""

import copy
import dataclasses
from pathlib import Path

import pytest
import yaml
from helpers import crds

from kftrain import config
from kftrain.errors import LaunchError
from kftrain.launch import spec
from kftrain.launch.kubernetes import pod
from kftrain.launch.kubernetes.kinds import indexed_job
from kftrain.launch.kubernetes.kinds.trainjob import KIND
from kftrain.launch.kubernetes.observation import Event, Observation, parse_event, parse_job
from kftrain.launch.kubernetes.states import assess
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths

ROOT = Path(__file__).parents[4]
OVERLAY = ROOT / "manifests" / "overlays" / "trainer"

TEXT = """
run: {storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch:
  backend: trainjob
  nodes: 2
  kubernetes:
    trainer_image: registry/trainer@sha256:0123
    gpus_per_node: 4
    node_selector: {pool: gpu}
    tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
    image_pull_secrets: [registry]
    affinity: {nodeAffinity: {}}
    ca_bundle: ours
    rack_label: topology.kubernetes.io/zone
    termination_grace_seconds: 77
"""
CREATED = "2026-11-21T10:00:00Z"
JOB = "lm-0123456789ab-train"


def resolve(*overrides):
    resolved = config.parse(TEXT, list(overrides))
    paths = RunPaths.of(resolved.run.storage_root, "lm-0123456789ab")
    return spec.make_job(TRAINING, paths, resolved, "mlflow-run"), resolved


def build(*overrides):
    training, resolved = resolve(*overrides)
    return KIND.build(training, resolved, "kfp-run-id")


def read_runtime():
    return yaml.safe_load((OVERLAY / "runtime.yaml").read_text())


def merge(base, patch):
    """What Trainer makes of a runtime and a patch, as far as we use it: maps are merged, named items by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {key: merge(base.get(key), patch.get(key)) for key in {**base, **patch}}
    if isinstance(base, list) and isinstance(patch, list) and all("name" in item for item in [*base, *patch]):
        named = {item["name"]: item for item in base}
        for item in patch:
            named[item["name"]] = merge(named.get(item["name"]), item)
        return list(named.values())
    return copy.deepcopy(base if patch is None else patch)


def merge_pods(job, runtime):
    """The template of the pods that Trainer makes."""
    (patch,) = job["spec"]["runtimePatches"]
    jobs = merge(runtime["spec"]["template"]["spec"], patch["trainingRuntimeSpec"]["template"]["spec"])
    (replicated,) = jobs["replicatedJobs"]
    template, trainer = replicated["template"]["spec"]["template"], job["spec"]["trainer"]
    (container,) = template["spec"]["containers"]
    container |= {"image": trainer["image"], "command": trainer["command"], "env": trainer["env"]}
    container["resources"] = trainer["resourcesPerNode"]
    return template


def test_the_runtime_is_valid_against_trainers_definition():
    crds.validate(read_runtime(), "trainer.kubeflow.org_trainingruntimes.yaml")


def test_its_pods_are_those_of_every_kind():
    training, resolved = resolve()
    expected = pod.build_template(KIND, training, training.workers, resolved.launch.kubernetes)
    made = merge_pods(build(), read_runtime())
    assert made["spec"].pop("restartPolicy") == "Never"
    (spread,) = made["spec"].pop("topologySpreadConstraints")  # a runtime cannot know the job's name
    (named,) = expected["spec"].pop("topologySpreadConstraints")
    assert spread.pop("matchLabelKeys") == list(named["labelSelector"]["matchLabels"])
    assert spread.pop("labelSelector") and spread == {key: value for key, value in named.items() if key in spread}
    assert made == expected


def test_a_permanent_error_ends_the_job_and_no_other_as_in_an_indexed_job():
    (replicated,) = read_runtime()["spec"]["template"]["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    training, resolved = resolve()
    expected = indexed_job.KIND.build_specification(training, resolved)["podFailurePolicy"]["rules"]
    expected[0]["onExitCodes"]["containerName"] = KIND.container
    assert rules == expected


def test_nothing_of_torchrun_is_asked_for():
    """A torch policy would set PET_ variables, and its number of processes."""
    assert read_runtime()["spec"]["mlPolicy"] == {"numNodes": 1}
    assert "numProcPerNode" not in build()["spec"]["trainer"]


def test_the_workers_meet_below_the_service_of_the_jobset():
    training, _ = resolve()
    assert KIND.build_address(training) == f"{JOB}-node-0-0.{JOB}"
    long = dataclasses.replace(training, run_uri="s3://bucket/" + "a" * 60)
    assert len(f"{KIND.make_job_name(long)}-node-0-999-abcde") <= 63


@pytest.mark.parametrize(
    ("override", "where", "fix"),
    [
        ("launch.kubernetes.priority_class=high", "launch.kubernetes.priority_class", "edit the TrainingRuntime"),
        ("launch.kubernetes.secrets=[mine]", "launch.kubernetes.secrets", "edit the TrainingRuntime"),
        ("launch.kubernetes.image_pull_policy=Always", "launch.kubernetes.image_pull_policy", "edit the Training"),
        ("launch.kubernetes.queue=team", "launch.kubernetes.queue", "launch.backend=pytorchjob"),
    ],
)
def test_what_a_trainjob_cannot_say_is_refused(override, where, fix):
    with pytest.raises(LaunchError) as caught:
        build(override)
    assert caught.value.where == where and fix in caught.value.fix and caught.value.exit_code == 13


def parse(status):
    metadata = {"name": JOB, "uid": "u", "creationTimestamp": CREATED, "labels": {"kftrain.io/task": "train"}}
    return parse_job({"metadata": metadata, "spec": {"trainer": {"numNodes": 2}}, "status": status}, 1.8e9, KIND)


def event(name, stamp, reason="FailedCreate"):
    about = {"uid": "of the Job", "name": name}
    return parse_event({"involvedObject": about, "reason": reason, "message": "no room", "lastTimestamp": stamp})


def test_why_there_are_no_pods_is_told_by_the_objects_that_trainer_makes():
    job = parse({"jobsStatus": [{"name": "node"}]})
    reasons = assess(Observation(job=job, events=[event(f"{JOB}-node-0", "2026-11-21T10:00:05Z")])).reasons
    assert [reason.text for reason in reasons] == ["FailedCreate: no room"]


@pytest.mark.parametrize(
    ("name", "stamp"), [(f"{JOB}-node-0", "2026-11-21T09:59:59Z"), ("another-node-0", "2026-11-21T10:00:05Z")]
)
def test_events_of_an_earlier_job_or_of_another_one_tell_nothing(name, stamp):
    job = parse({"jobsStatus": [{"name": "node"}]})
    assert assess(Observation(job=job, events=[event(name, stamp)])).reasons == ()


def test_a_status_without_conditions_means_that_the_controller_has_looked_at_it():
    assert assess(Observation(job=parse({"jobsStatus": [{"name": "node"}]}))).reasons == ()


def test_without_any_status_the_controller_is_away():
    (reason,) = assess(Observation(job=parse({}), events=[Event("x", "FailedCreate", "of another")])).reasons
    assert "the controller of Kubeflow Trainer has not looked at it" in reason.text
