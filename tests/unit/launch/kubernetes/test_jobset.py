"""The JobSet as data: a Job for each role, whose pods are those of every other kind of job."""

import dataclasses
from pathlib import Path

from helpers import crds

from kftrain import config
from kftrain.launch import spec
from kftrain.launch.kubernetes import pod
from kftrain.launch.kubernetes.kinds import indexed_job
from kftrain.launch.kubernetes.kinds.jobset import KIND
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths

ROOT = Path(__file__).parents[4]

TEXT = """
run: {storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch:
  backend: jobset
  nodes: 2
  kubernetes: {trainer_image: "registry/trainer@sha256:0123", gpus_per_node: 4, queue: team, priority_class: high}
"""
CREATED = "2026-11-21T10:00:00Z"
JOB = "lm-0123456789ab-train"
SERVERS = spec.Role("server", 3, 1, ("server", "--port", "1"))


def resolve(*overrides, roles=(SERVERS,)):
    resolved = config.parse(TEXT, list(overrides))
    paths = RunPaths.of(resolved.run.storage_root, "lm-0123456789ab")
    training = spec.make_job(TRAINING, paths, resolved, "mlflow-run")
    return dataclasses.replace(training, roles=(*training.roles, *roles)), resolved


def build(*overrides):
    return KIND.build(*resolve(*overrides), "kfp-run-id")


def test_each_role_has_a_job_with_the_pods_and_the_rules_of_every_kind():
    training, resolved = resolve()
    rules = indexed_job.KIND.build_specification(training, resolved)["podFailurePolicy"]
    replicated = build()["spec"]["replicatedJobs"]
    assert [(one["name"], one["replicas"]) for one in replicated] == [("worker", 1), ("server", 1)]
    for one, role in zip(replicated, training.roles, strict=True):
        job = one["template"]["spec"]
        assert job["completions"] == job["parallelism"] == role.replicas and job["completionMode"] == "Indexed"
        assert job["podFailurePolicy"] == rules and job["backoffLimit"] == job["backoffLimitPerIndex"] == 1000
        expected = pod.build_template(KIND, training, role, resolved.launch.kubernetes)
        assert job["template"]["spec"].pop("restartPolicy") == "Never"
        assert job["template"] == expected


def test_it_is_complete_when_its_workers_are_and_has_no_restarts_of_its_own():
    job = build()["spec"]
    assert job["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["worker"]}
    assert job["failurePolicy"] == {"maxRestarts": 0}


def test_the_workers_meet_below_its_service_and_the_names_of_pods_fit():
    training, _ = resolve()
    assert KIND.build_address(training) == f"{JOB}-worker-0-0.{JOB}"
    long = dataclasses.replace(training, run_uri="s3://bucket/" + "a" * 60)
    assert len(f"{KIND.make_job_name(long)}-worker-0-999-abcde") <= 63


def test_a_job_tells_its_roles():
    assert KIND.count_replicas(build()) == {"worker": 2, "server": 3}
    assert KIND.count_replicas({"spec": {}}) == {"worker": 1}, "somebody else's"


def test_pods_tell_their_role_and_their_number():
    labels = {KIND.job_name_label: JOB, KIND.index_label: "1", KIND.role_label: "server"}
    one = {"metadata": {"name": "p", "uid": "u", "labels": labels, "creationTimestamp": CREATED}}
    assert (KIND.read_role(one), KIND.read_index(one)) == ("server", 1)
    assert KIND.make_pod_selector(JOB) == f"{KIND.job_name_label}={JOB}"


def test_parameter_servers_are_a_role_without_gpus_whose_secret_is_in_no_request():
    training, resolved = resolve(
        "server.num_servers=2",
        "server.tables=[{name: ids, dim: 4}]",
        "parallel.strategy=ddp",
        "launch.kubernetes.secrets=[storage, servers]",
        roles=(),
    )
    servers = training.roles[1]
    assert (servers.name, servers.replicas, servers.processes_per_node) == ("server", 2, 1)
    assert servers.arguments == ("server", "--run-uri", training.run_uri, "--digest", training.config_digest)
    job = KIND.build(training, resolved, "kfp-run-id")
    crds.validate(job, "jobset.x-k8s.io_jobsets.yaml")
    of_workers, of_servers = (
        role["template"]["spec"]["template"]["spec"]["containers"][0] for role in job["spec"]["replicatedJobs"]
    )
    assert of_servers["command"] == ["kftrain", *servers.arguments]
    assert of_workers["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "nvidia.com/gpu" not in of_servers["resources"]["limits"]
    for container in (of_workers, of_servers):
        assert [one["secretRef"]["name"] for one in container["envFrom"]] == ["storage", "servers"]
        assert "KFTRAIN_SERVER_SECRET" not in {variable["name"] for variable in container["env"]}
    assert job["spec"]["successPolicy"]["targetReplicatedJobs"] == ["worker"]
