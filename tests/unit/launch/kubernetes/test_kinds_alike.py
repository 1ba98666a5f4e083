"""What the documents of TrainJob, JobSet and RayJob have in common; what they have not is in a file for each."""

import dataclasses
from pathlib import Path

import pytest
import test_jobset
import test_rayjob
import test_trainjob
import yaml
from helpers import crds

from kftrain.errors import LaunchError
from kftrain.launch import spec
from kftrain.launch.kubernetes.observation import Observation, parse_job
from kftrain.launch.kubernetes.states import State, assess

ROOT = Path(__file__).parents[4]
CREATED = "2026-11-21T10:00:00Z"

MODULES = {"trainjob": test_trainjob, "jobset": test_jobset, "rayjob": test_rayjob}
OVERLAYS = {"trainjob": "trainer", "jobset": "jobset", "rayjob": "kuberay"}


@pytest.fixture(params=MODULES)
def name(request):
    return request.param


@pytest.fixture
def module(name):
    """The file of a kind: `KIND`, `resolve`, `build`."""
    return MODULES[name]


def test_the_job_is_the_golden_one(name, module):
    """After a wanted change: write `yaml.safe_dump(module.build())` there and read the difference."""
    assert yaml.safe_dump(module.build()) == (ROOT / "tests" / "golden" / f"{name}.yaml").read_text()


def test_the_job_is_valid_against_the_definition(module):
    crds.validate(module.build(), f"{module.KIND.group}_{module.KIND.plural}.yaml")


def test_a_job_tells_for_which_configuration_it_was_started(module):
    assert module.KIND.read_config_digest(module.build()) == module.resolve()[1].digest()


@pytest.mark.parametrize("name", ["jobset", "rayjob"])  # a TrainJob refuses a queue
@pytest.mark.parametrize(
    ("override", "suspended"), [("launch.kubernetes.queue=team", True), ('launch.kubernetes.queue=""', False)]
)
def test_a_queue_lets_it_go(module, override, suspended):
    job = module.build(override)
    assert module.KIND.is_suspended(job) is suspended
    assert ("kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]) is suspended


@pytest.mark.parametrize("name", ["trainjob", "rayjob"])  # a JobSet has them
def test_servers_are_refused(module):
    training, resolved = module.resolve()
    both = dataclasses.replace(training, roles=(*training.roles, spec.Role("server", 1, 1, ("server",))))
    with pytest.raises(LaunchError, match=r"has workers alone.*server"):
        module.KIND.build(both, resolved)


@pytest.mark.parametrize(
    ("name", "status", "state"),
    [
        ("trainjob", "Complete", State.SUCCEEDED),
        ("trainjob", "Failed", State.FAILED),
        ("trainjob", "Suspended", State.QUEUED),
        ("jobset", "Completed", State.SUCCEEDED),
        ("jobset", "Failed", State.FAILED),
        ("jobset", "Suspended", State.QUEUED),
    ],
)
def test_its_conditions_are_those_of_all_kinds(module, status, state):
    job = module.build()
    metadata = {"name": "j", "uid": "u", "creationTimestamp": CREATED, "labels": {"kftrain.io/task": "train"}}
    conditions = {"conditions": [{"type": status, "status": "True"}]}
    parsed = parse_job({"metadata": metadata, "spec": job["spec"], "status": conditions}, 1.8e9, module.KIND)
    assert assess(Observation(job=parsed)).state is state
    assert parsed.num_pods == sum(role.replicas for role in module.resolve()[0].roles)


def test_who_starts_jobs_may_create_them_and_who_collects_them_may_not(name, module):
    documents = list(yaml.safe_load_all((ROOT / "manifests" / "overlays" / OVERLAYS[name] / "roles.yaml").read_text()))
    roles = {one["metadata"]["name"]: one["rules"] for one in documents if one["kind"] == "Role"}
    verbs = {}
    for binding in (one for one in documents if one["kind"] == "RoleBinding"):
        rule, *others = roles[binding["roleRef"]["name"]]
        assert (rule["apiGroups"], rule["resources"]) == ([module.KIND.group], [module.KIND.plural])
        patches_pods = "create" in rule["verbs"] and module.KIND.replaces_failed_pods
        assert [(one["resources"], one["verbs"]) for one in others] == [(["pods/status"], ["patch"])] * patches_pods
        verbs |= {subject["name"]: set(rule["verbs"]) for subject in binding["subjects"]}
    assert verbs["pipeline-runner"] == verbs["kftrain-scheduled"] == {"create", "get", "list", "patch", "delete"}
    assert verbs["kftrain-gc"] == {"get", "list", "delete"}
