"""Pods and jobs of others that have our labels: what is not a worker is not looked at."""

import pytest

from kftrain.launch.kubernetes import observation
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.lease import has_pods_at_work

CREATED = "2026-11-21T10:00:00Z"


def pod(name, labels):
    return {"metadata": {"name": name, "uid": name, "creationTimestamp": CREATED, "labels": labels}, "spec": {}}


class FakeCluster:
    kind = KIND

    def __init__(self, *pods):
        self.pods = pods

    def list_pods(self, name):
        return self.pods

    def read_job(self, name):
        return None


@pytest.mark.parametrize("label", ["first", "", "-1", "1.5", "\u0661", "9" * 20, "0x1", " 1"])
def test_a_foreign_pods_label_is_no_traceback(label):
    own, foreign = pod("w-1", {KIND.index_label: "1"}), pod("debug", {KIND.index_label: label})
    assert [(found.name, found.index) for found in observation.parse_pods([own, foreign], 0.0, KIND)] == [("w-1", 1)]
    assert has_pods_at_work(FakeCluster(own, foreign), "j") and not has_pods_at_work(FakeCluster(foreign), "j")


def test_a_pod_without_labels_is_read():
    assert [found.index for found in observation.parse_pods([pod("w", None)], 0.0, KIND)] == [0]


def test_a_job_of_somebody_else_is_read():
    metadata = {"name": "theirs", "uid": "u", "creationTimestamp": CREATED, "labels": None, "annotations": None}
    item = {"metadata": metadata, "spec": {}}
    found = observation.parse_job(item, 0.0, KIND)
    assert (found.task, found.suspended_by_user, found.num_pods) == ("", False, 1)
