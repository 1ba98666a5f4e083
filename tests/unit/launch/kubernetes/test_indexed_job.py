"""The job of a sharding on a cluster, as data: an Indexed Job whose pods do not meet."""

import contextlib
from pathlib import Path

import pytest
import yaml
from helpers.kubernetes_types import require_valid

from kftrain import config, errors
from kftrain.errors import FIRST_RETRYABLE_CODE, KftrainError, LaunchError
from kftrain.launch import base, spec
from kftrain.launch.kubernetes.control import ClusterJobs
from kftrain.launch.kubernetes.kinds import jobset, pytorchjob, trainjob
from kftrain.launch.kubernetes.kinds.indexed_job import KIND
from kftrain.launch.kubernetes.observation import Observation, keep_newest, parse_job, parse_pods
from kftrain.launch.kubernetes.states import State, assess
from kftrain.run.job_tasks import SHARDING, TRAINING
from kftrain.run.paths import RunPaths
from kftrain.stages import dry_run, preflight

ROLES = Path(__file__).parents[4] / "manifests" / "overlays" / "shard-pods" / "roles.yaml"
GOLDEN = Path(__file__).parents[3] / "golden" / "indexed_job.yaml"

TEXT = """
run: {storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
data: {source: "s3://bucket/raw", shard_pods: 8}
launch:
  backend: pytorchjob
  nodes: 2
  kubernetes:
    trainer_image: registry/trainer@sha256:0123
    gpus_per_node: 4
    queue: team
"""
CREATED = "2026-11-21T10:00:00Z"


def build(*overrides):
    resolved = config.parse(TEXT, list(overrides))
    paths = RunPaths.of(resolved.run.storage_root, "lm-0123456789ab")
    return KIND.build(spec.make_job(SHARDING, paths, resolved, "mlflow-run"), resolved, "kfp-run-id")


def container_of(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def test_the_job_is_the_golden_one():
    """After a wanted change: write `yaml.safe_dump(build())` there and read the difference."""
    assert yaml.safe_dump(build()) == GOLDEN.read_text()


def test_the_job_is_valid_for_kubernetes():
    require_valid("V1Job", build())


def test_a_pod_reads_its_share_from_its_label_and_all_are_told_their_number():
    container = container_of(build())
    (rank,) = (each for each in container["env"] if each["name"] == spec.NODE_RANK_ENV)
    path = "metadata.labels['batch.kubernetes.io/job-completion-index']"
    assert rank["valueFrom"] == {"fieldRef": {"fieldPath": path}}
    assert container["command"][-4:] == ["--processes", "1", "--nodes", "8"]
    assert container["command"][:4] == ["kftrain", "worker", "--task", "shard"]


def test_pods_take_no_gpu():
    assert container_of(build())["resources"]["limits"].keys() == {"cpu", "memory"}


def test_a_permanent_error_ends_the_job_and_no_other():
    (first, second) = build()["spec"]["podFailurePolicy"]["rules"]
    codes = {
        kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KftrainError)
    }
    permanent = {code for code in codes if code < FIRST_RETRYABLE_CODE}
    values = first["onExitCodes"]["values"]
    assert permanent < set(values) and first["action"] == "FailJob"
    assert values == list(range(1, FIRST_RETRYABLE_CODE)), "as for the launcher, and for PyTorchJobs"
    assert second["action"] == "Ignore" and second["onPodConditions"][0]["type"] == "DisruptionTarget"


def test_the_launcher_builds_it_for_a_sharding_and_who_looks_for_a_runs_jobs_always_finds_it():
    resolved, paths = config.parse(TEXT), RunPaths.of("s3://bucket/root", "lm-0123456789ab")
    launcher = base.build_launcher(resolved)
    kinds = {
        task: launcher.build(spec.make_job(task, paths, resolved)).content["kind"] for task in (TRAINING, SHARDING)
    }
    assert kinds == {TRAINING: "PyTorchJob", SHARDING: "Job"}
    for pods in (8, 0):  # a job of before the setting was changed is a job
        jobs = base.find_jobs(config.parse(TEXT, [f"data.shard_pods={pods}"]))
        assert isinstance(jobs, ClusterJobs) and set(jobs._kinds) == {pytorchjob.KIND, trainjob.KIND, jobset.KIND, KIND}


@pytest.mark.parametrize(("pods", "refused"), [(8, True), (0, False)])
def test_a_launcher_that_may_not_create_jobs_says_so_before_anything_is_done(monkeypatch, pods, refused):
    launcher = base.build_launcher(config.parse(TEXT, [f"data.shard_pods={pods}"]))

    class Cluster:
        namespace = "team"

        def __init__(self, kind):
            self.kind = kind

        def knows_jobs(self):
            return True

        def is_allowed(self, verb):
            return self.kind is not KIND or verb != "create"

    launcher.clusters = [Cluster(kind) for kind in launcher._kinds]
    with pytest.raises(LaunchError, match="may not create Jobs") if refused else contextlib.nullcontext():
        launcher.check()


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["data.source=/home/me/texts"], True),
        (["data.source=/home/me/texts", "data.shard_pods=0"], False),
        (["data.source=/home/me/texts", "launch.kubernetes.volumes=[{name: a}]"], False),
        (["data.source=stdlib"], False),
        ([], False),
    ],
)
def test_a_source_of_this_machine_is_refused_before_there_is_a_pod(overrides, refused):
    resolved = config.parse(TEXT, overrides)
    with (
        pytest.raises(LaunchError, match=r"data.source: the pods of data\.shard_pods cannot reach")
        if refused
        else contextlib.nullcontext()
    ):
        preflight.check_shard_pods(resolved)


def test_who_starts_jobs_may_create_them_and_who_collects_them_may_not():
    """Whoever may create a Job may run any pod, as any account of the namespace."""
    rules = list(yaml.safe_load_all((ROLES).read_text()))
    roles = {one["metadata"]["name"]: one["rules"] for one in rules if one["kind"] == "Role"}
    verbs = {}
    for binding in (one for one in rules if one["kind"] == "RoleBinding"):
        for subject in binding["subjects"]:
            rule, *others = roles[binding["roleRef"]["name"]]
            assert [(one["resources"], one["verbs"]) for one in others] == [(["pods/status"], ["patch"])] * (
                "create" in rule["verbs"]
            )
            assert (rule["apiGroups"], rule["resources"]) == (["batch"], ["jobs"])
            verbs[subject["name"]] = set(rule["verbs"])
    assert verbs["pipeline-runner"] == verbs["kftrain-scheduled"] == {"create", "get", "list", "patch", "delete"}
    assert verbs["kftrain-gc"] == {"get", "list", "delete"}


@pytest.mark.parametrize(("pods", "shown"), [(0, False), (1, False), (2, True)])
def test_a_dry_run_shows_it(pods, shown):
    text = dry_run.describe_jobs_of_new_run(config.parse(TEXT, [f"data.shard_pods={pods}"]))
    kinds = [document["kind"] for document in yaml.safe_load_all(text)]
    assert kinds == ["PyTorchJob", "PyTorchJob", *(["Job"] if shown else [])]


def test_a_dry_run_shows_the_processes_of_this_machine():
    text = dry_run.describe_jobs_of_new_run(config.parse("data: {shard_pods: 3}"))
    assert "# shard: 1 x 3 processes\n" in text and "--task shard" in text


def job(*true):
    metadata = {"name": "j", "uid": "u", "creationTimestamp": CREATED, "labels": {"kftrain.io/task": "shard"}}
    conditions = [{"type": name, "status": "True"} for name in true]
    return {"metadata": metadata, "spec": {"completions": 2}, "status": {"conditions": conditions, "active": 2}}


def pod(index, uid, **state):
    metadata = {"name": uid, "uid": uid, "creationTimestamp": CREATED}
    labels = {KIND.index_label: str(index)} if index is not None else {KIND.index_label: "x"}
    status = {"containerStatuses": [{"name": "worker", "state": state}]}
    return {"metadata": {**metadata, "labels": labels}, "spec": {"nodeName": "n"}, "status": status}


def look(*conditions, pods):
    return Observation(job=parse_job(job(*conditions), 1.0e10, KIND), pods=keep_newest(parse_pods(pods, 1.0e10, KIND)))


def test_its_conditions_are_those_of_all_kinds():
    pods = [pod(0, "a", running={}), pod(1, "b", running={})]
    for words, state in {
        ("Complete",): State.SUCCEEDED,
        ("FailureTarget", "Failed"): State.FAILED,
        ("Suspended",): State.QUEUED,
        (): State.WORKING,
    }.items():
        assert assess(look(*words, pods=pods)).state is state
    assert assess(look(pods=pods)).word == "Sharding"


def test_a_pod_that_is_through_holds_nobody_up_and_one_that_failed_has_a_successor():
    ended, failed = {"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 138}}
    pods = [pod(0, "a", **ended), pod(1, "b", **failed), pod(1, "c", running={})]
    seen = look(pods=pods)
    assert {one.uid for one in seen.pods} == {"a", "c"} and assess(seen).state is State.WORKING
    assert parse_pods([pod(None, "x", running={})], 0.0, KIND) == []
