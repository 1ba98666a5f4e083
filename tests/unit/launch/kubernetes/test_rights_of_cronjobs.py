"""As whom CronJobs run: the rights in the manifests are those that a launch asks for, and one less is missed."""

from pathlib import Path

import pytest
import yaml
from helpers.fakes.kube_namespace import time_stamp
from helpers.launching import JOB, WORKERS, wait_until

from kftrain.errors import LaunchError
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND

MANIFESTS = Path(__file__).parents[4] / "manifests"
ACCOUNT = "kftrain-scheduled"


def documents():
    paths = (MANIFESTS / "base" / "scheduled.yaml", MANIFESTS / "overlays" / "cluster-reader" / "roles.yaml")
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def bound_roles():
    """The roles that are bound to the account."""
    bindings = [each for each in documents() if each["kind"].endswith("RoleBinding")]
    own = [each for each in bindings if ACCOUNT in [subject["name"] for subject in each["subjects"]]]
    return {each["roleRef"]["name"] for each in own}


def rights(*names):
    """(resource, verb) of roles."""
    rules = [rule for each in documents() if each["metadata"]["name"] in names for rule in each.get("rules", [])]
    return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


OWN = rights(ACCOUNT)
QUEUES = {("workloads", "get"), ("workloads", "list")}
"""Asked for where Kueue is."""

DEVICES = {("nodes", "list")}
"""Asked for with a fabric whose pods need devices."""


def night(launch, namespace, make_job):
    """What one launch may meet: a job of before, logs, a node that dies under a pod, and the cleaning up at the end."""
    resolved, training = make_job()
    namespace.create("pytorchjobs", KIND.build(training, resolved))
    namespace.condition(JOB, "Failed")
    namespace.condition(JOB, "Created")
    one = launch()

    def until(condition):
        missing = ("may not", "is forbidden")
        wait_until(lambda: condition() or not one.is_running or any(words in one.output for words in missing))

    until(lambda: len(namespace.created) == 2)
    if len(namespace.created) == 2:
        namespace.make_pods(JOB)
        until(lambda: "Scheduling" in one.output)
        namespace.run_pods(JOB)
        namespace.step(JOB, 1, 20)
        until(lambda: "Training" in one.output)
        conditions = [{"type": "Ready", "status": "Unknown"}]
        namespace.objects["nodes"]["node-2"] = {"metadata": {"name": "node-2"}, "status": {"conditions": conditions}}
        namespace.set_pod(WORKERS[1], conditions=[("Ready", "False")], phase="Running", running={})
        namespace.holds_pods = True
        namespace.delete("pods", WORKERS[1])
        namespace.get("pods", WORKERS[1])["metadata"]["deletionTimestamp"] = time_stamp(-61)
        until(lambda: namespace.forced)
        namespace.holds_pods = False
        namespace.release_pods()
        namespace.finish(JOB)
    code = one.finish()
    one.launcher.clean(one.paths, "job")
    return code, one.output


def test_the_account_may_do_what_a_launch_does_and_no_more(launch, server, namespace, make_job):
    server.rights = rights(*bound_roles())
    code, output = night(launch, namespace, make_job)
    assert code == 0 and "may not" not in output
    assert server.rights_used == server.rights - QUEUES - DEVICES


@pytest.mark.parametrize("right", sorted(OWN))
def test_with_one_verb_less_it_fails_or_says_what_is_missing(right, launch, server, namespace, make_job):
    server.rights = rights(*bound_roles()) - {right}
    try:
        _, output = night(launch, namespace, make_job)
    except LaunchError as error:
        output = error.line
    finally:
        server.rights = None
        for name in list(namespace.objects["pytorchjobs"]):
            namespace.delete("pytorchjobs", name)
    resource, verb = right
    assert (f"may not {verb} {resource}" in output) or f"{resource} is forbidden: cannot {verb}" in output, output
