"""What a kind says of itself is all that the rest knows of it, and a job may have several roles."""

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kftrain.launch.kubernetes.control import list_jobs
from kftrain.launch.kubernetes.job_client import NotServedError
from kftrain.launch.kubernetes.kinds.kind import Kind
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.lease import has_pods_at_work
from kftrain.launch.kubernetes.logs import Logs
from kftrain.launch.kubernetes.observation import Event, Observation, keep_newest, parse_job, parse_pods
from kftrain.launch.kubernetes.pod_exits import PodExits
from kftrain.launch.kubernetes.states import State, assess
from kftrain.launch.spec import JobSpec, Role

CREATED = "2026-11-21T10:00:00Z"


class Batch(Kind):
    """Another kind: its own words, labels and paths; servers beside its workers."""

    name = "Batch"
    group = "example.com"
    version = "v2"
    plural = "batches"
    operator = "batch operator"
    install = "install it"
    container = "main"
    job_name_label = "b/job"
    index_label = "b/index"
    role_label = "b/role"
    creation_failures = frozenset(("NoRoom",))
    condition_names: ClassVar = {"Complete": "Succeeded", "Broken": "Failed", "Paused": "Suspended"}

    def build_specification(self, spec, config):
        return {"groups": [{"name": role.name, "size": role.replicas} for role in spec.roles]}

    def build_address(self, spec):
        return "first"

    def list_replicas(self, job):
        return [(group["name"], group["size"], {}) for group in job["spec"].get("groups", [])]


BATCH = Batch()


def job(*true, **spec):
    conditions = [{"type": name, "status": "True"} for name in true] + [{"type": "Old", "status": "False"}]
    metadata = {"name": "j", "uid": "u", "creationTimestamp": CREATED}
    groups = [{"name": "worker", "size": 2}, {"name": "server", "size": 1}]
    return {"metadata": metadata, "spec": {"groups": groups, **spec}, "status": {"conditions": conditions}}


def pod(role, index, uid="", **state):
    labels = {"b/job": "j", "b/role": role, "b/index": str(index)}
    metadata = {"name": f"{role}{index}", "uid": uid or f"{role}{index}", "creationTimestamp": CREATED}
    status = {"containerStatuses": [{"name": "main", "state": state}]}
    return {"metadata": {**metadata, "labels": labels}, "spec": {"nodeName": "n"}, "status": status}


RUNNING = {"running": {}}
PODS = [pod("worker", 0, **RUNNING), pod("worker", 1, **RUNNING), pod("server", 0, **RUNNING)]


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (job("Complete"), State.SUCCEEDED),
        (job("Broken"), State.FAILED),
        (job("Paused"), State.QUEUED),
        (job(suspend=True), State.QUEUED),
        (job("Complete", "Broken"), State.FAILED),
        (job("Succeded"), State.RENDEZVOUS),
    ],
)
def test_a_kinds_own_words_lead_to_the_states_of_all_kinds(found, state):
    seen = SimpleNamespace(
        job=parse_job(found, 0.0, BATCH),
        pods=parse_pods(PODS, 0.0, BATCH),
        events=(),
        workload=None,
        step=0,
        target_step=0,
        claimed=False,
        lost_nodes=frozenset(),
    )
    assert assess(seen).state is state


def test_a_job_that_lacks_a_server_is_not_started_yet():
    seen = SimpleNamespace(
        job=parse_job(job("Created"), 0.0, BATCH),
        pods=parse_pods(PODS[:2], 0.0, BATCH),
        events=(),
        step=0,
        target_step=0,
        lost_nodes=frozenset(),
    )
    assert assess(seen).state is State.SCHEDULING
    assert parse_job(job(), 0.0, BATCH).num_pods == 3


@pytest.mark.parametrize(("kind", "path"), [(BATCH, ["spec", "suspend"]), (KIND, ["spec", "runPolicy", "suspend"])])
def test_a_kind_is_suspended_where_it_says(kind, path):
    patch = found = kind.build_suspension(True)
    for key in path:
        assert list(found) == [key]
        found = found[key]
    assert found is True and kind.is_suspended(patch) and not kind.is_suspended(kind.build_suspension(False))
    assert not kind.is_suspended({"spec": {}}) and not kind.is_suspended({"spec": None})


def test_pods_of_two_roles_with_one_number_are_two():
    ended = {"terminated": {"exitCode": 1}}
    worker, server = parse_pods([pod("worker", 0, **ended), pod("server", 0, **ended)], 0.0, BATCH)
    assert (worker.place, server.place) == ("worker-0", "server-0")
    exits = PodExits(10.0)
    for each in (worker, server):
        exits.note_end(each, 0.0)
    assert {each.uid for each in exits.list_last()} == {"worker0", "server0"}


def test_a_pod_that_failed_and_stays_does_not_stand_for_its_successor():
    """As in Jobs of Kubernetes itself; within one second the one that has ended is the older one."""
    failed = pod("worker", 0, "a", terminated={"exitCode": 138})
    now = pod("worker", 0, "b", **RUNNING)
    other = pod("worker", 1, **RUNNING)
    for items in ([failed, now, other], [other, now, failed]):
        assert {each.uid for each in keep_newest(parse_pods(items, 0.0, BATCH))} == {"b", "worker1"}
    failed["metadata"]["creationTimestamp"] = "2026-11-21T10:00:09Z"
    assert {each.uid for each in keep_newest(parse_pods([failed, now], 0.0, BATCH))} == {"a"}


def test_lines_of_a_server_bear_its_name_and_are_no_steps_of_a_worker():
    stamp = "2026-11-21T10:00:00Z"
    lines = {"worker0": [f"{stamp} kftrain| verifying x".encode()], "server0": [f"{stamp} hello".encode()]}
    ended = {"terminated": {"exitCode": 0}}
    items = {name: pod(name[:-1], 0, **ended) for name in lines}
    source = SimpleNamespace(
        read_pod=lambda name: {**items[name], "status": {"phase": "Succeeded"}},
        read_log_lines=lambda name, since="", follow=True: [line + b"\n" for line in lines[name]],
    )
    found = []
    logs = Logs(source, 2, found.append, limited=False)
    logs.follow(parse_pods(items.values(), 0.0, BATCH))
    logs.finish()
    assert "server-0: hello" in found and logs.copy_tails()["server-0"] == ["hello"]


def test_why_no_pod_is_made_is_told_in_the_operators_own_words():
    events = [Event("u", "FailedCreatePod", "of another operator"), Event("u", "NoRoom", "exceeded quota: gpus")]
    assert states_reasons(events) == ["NoRoom: exceeded quota: gpus"]
    assert states_reasons(events[:1]) == []


def states_reasons(events):
    """Why a job of that kind waits, which has no pods."""
    seen = parse_job(job(), 1.76e9, BATCH)
    return [
        reason.text
        for reason in assess(Observation(job=dataclasses.replace(seen, has_status=True), events=events)).reasons
    ]


class Served:
    namespace = "n"

    def __init__(self, kind, names, is_served=True):
        self.kind = kind
        self._names = names
        self._is_served = is_served

    def list_jobs(self, selector):
        if not self._is_served:
            raise NotServedError(f"no {self.kind.plural}")
        return [{"metadata": {"name": name}} for name in self._names]


def test_a_kind_that_the_cluster_has_not_is_left_out_unless_there_is_no_other():
    here, away = Served(KIND, ["a"]), Served(BATCH, [], is_served=False)
    assert [(cluster.kind, job["metadata"]["name"]) for cluster, job in list_jobs([away, here], "x")] == [(KIND, "a")]
    assert [job["metadata"]["name"] for _, job in list_jobs([here, Served(BATCH, ["b"])], "x")] == ["a", "b"]
    with pytest.raises(NotServedError, match="no batches"):
        list_jobs([away], "x")


def test_somebody_elses_pod_is_told_by_the_kind():
    foreign = pod("worker", "first", **RUNNING)
    cluster = SimpleNamespace(kind=BATCH, read_job=lambda name: None, list_pods=lambda name: [foreign])
    assert not has_pods_at_work(cluster, "j")
    cluster.list_pods = lambda name: [foreign, PODS[0]]
    assert has_pods_at_work(cluster, "j")


def test_a_job_says_how_large_it_is():
    workers, servers = Role("worker", 2, 4, ("worker",)), Role("server", 1, 1, ("server",))
    one = JobSpec("train", "runs/r", "d", (workers,))
    both = JobSpec("train", "runs/r", "d", (workers, servers))
    assert (one.size, one.num_pods, one.workers) == ("2 x 4 processes", 2, workers)
    assert (both.size, both.num_pods, both.workers) == ("2 x 4 and 1 x 1 processes", 3, workers)
