"""Which jobs nobody will take away."""

import pytest

from kftrain.launch.kubernetes.control import explain_garbage
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.kubernetes.labels import SEEN_ANNOTATION, SUSPENDED_ANNOTATION

NOW = 1_800_000_000.0
HOUR = 3600.0


def stamp(hours_ago):
    from datetime import datetime, timezone

    return datetime.fromtimestamp(NOW - hours_ago * HOUR, timezone.utc).isoformat(timespec="seconds")


def job(created=100.0, seen=None, owner=False, conditions=(), **annotations):
    found = {"name": "r-train", "uid": "u", "creationTimestamp": stamp(created), "annotations": annotations}
    if seen is not None:
        found["annotations"][SEEN_ANNOTATION] = stamp(seen)
    if owner:
        found["ownerReferences"] = [{"kind": "Workflow", "name": "w"}]
    status = {"conditions": [{"type": name, "status": "True"} for name in conditions]}
    return {"metadata": found, "spec": {}, "status": status}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Error"])
def test_a_job_of_a_pipeline_run_that_has_ended(phase):
    assert explain_garbage(KIND, job(seen=0, owner=True), phase, NOW) == f"its pipeline run has ended: {phase}"
    assert explain_garbage(KIND, job(seen=0, owner=True), "Running", NOW) == ""


def test_a_job_that_has_ended_and_whose_launcher_does_not_look_any_more():
    assert explain_garbage(KIND, job(seen=2, conditions=["Failed"]), "", NOW) == "it has ended: Failed"
    assert explain_garbage(KIND, job(seen=0.5, conditions=["Failed"]), "", NOW) == ""


def test_a_job_that_no_launcher_looks_at():
    assert explain_garbage(KIND, job(seen=3, owner=True), "", NOW) == "no launcher has looked at it for 3 h"
    assert explain_garbage(KIND, job(seen=1, owner=True), "", NOW) == ""
    assert explain_garbage(KIND, job(created=3, owner=True), "", NOW) != ""


@pytest.mark.parametrize("phase", ["Pending", "Running"])
def test_a_launcher_that_may_not_annotate_keeps_its_job_while_its_pipeline_runs(phase):
    assert explain_garbage(KIND, job(created=3, owner=True), phase, NOW) == ""
    assert explain_garbage(KIND, job(seen=24 * 8, owner=True), phase, NOW) == ""
    assert explain_garbage(KIND, job(created=2, owner=True, conditions=["Succeeded"]), phase, NOW) == ""


def test_a_laptop_may_sleep_over_a_weekend():
    assert explain_garbage(KIND, job(seen=72), "", NOW) == ""
    assert explain_garbage(KIND, job(seen=24 * 8), "", NOW) == "no launcher has looked at it for 192 h"


def test_what_a_person_has_suspended_stays_and_what_goes_is_left_alone():
    assert explain_garbage(KIND, job(seen=24 * 30, **{SUSPENDED_ANNOTATION: "2026"}), "", NOW) == ""
    going = job(seen=24 * 30)
    going["metadata"]["deletionTimestamp"] = stamp(1)
    assert explain_garbage(KIND, going, "Failed", NOW) == ""


@pytest.mark.parametrize("stamp_", ["yesterday", "", "2026-13-01T00:00:00Z", "\u0661", None, "99999999999999"])
def test_a_bad_annotation_counts_as_none(stamp_):
    """Anybody can annotate; one job must not keep the others of the namespace from being collected."""
    for hours, expected in ((3, "no launcher has looked at it for 3 h"), (1, "")):
        found = job(created=hours, owner=True)
        found["metadata"]["annotations"][SEEN_ANNOTATION] = stamp_
        assert explain_garbage(KIND, found, "", NOW) == expected


@pytest.mark.parametrize("name", ["annotations", "labels", "ownerReferences"])
def test_what_a_job_lacks_is_no_traceback(name):
    found = job(created=24 * 8)
    found["metadata"][name] = None
    assert explain_garbage(KIND, found, "", NOW) == "no launcher has looked at it for 192 h"
