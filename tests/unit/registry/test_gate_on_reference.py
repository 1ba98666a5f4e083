"""The gate on real files: better on the newest data, worse on the reference set."""

import pytest

from kftrain.core import storage
from kftrain.errors import EvaluationError
from kftrain.run.documents import ReferenceSet

THERE = "f" * 64


@pytest.fixture
def measured(finished, add_reference):
    """A run that is measured on the newest data and on the reference set."""

    def make(name, quality, there):
        run = finished(name, quality)
        if there is not None:
            add_reference(run, there, THERE)
        found = ReferenceSet(manifest_uri="/data/manifest.json", dataset_digest="d", evaluation_digest=THERE)
        storage.publish_json(run.paths.reference_set, found.to_dict())
        return run

    return make


def test_what_got_worse_on_the_reference_set_is_not_promoted(measured, aliases):
    measured("one", 0.6, 0.8).submit()
    worse = measured("two", 0.7, 0.75).submit()
    assert not worse.promoted and not worse.awaits_person
    assert worse.reason.startswith("not promoted, worse on the reference set: improvement -0.05")
    assert measured("three", 0.7, 0.8).submit().promoted and aliases()["champion"] == 3


def test_a_champion_that_was_not_measured_there_leaves_the_decision_to_a_person(measured, finished, aliases):
    finished("one", 0.6).submit()
    found = measured("two", 0.7, 0.75).submit()
    assert not found.promoted and found.awaits_person and aliases() == {"champion": 1, "challenger": 2}
    assert "has no evaluation on the reference set" in found.reason


def test_a_challenger_that_was_not_measured_there_is_an_error(measured):
    run = measured("one", 0.6, None)
    registered = run.register()
    with pytest.raises(EvaluationError, match=r"metrics\.json is missing"):
        run.gate(registered)


def test_a_challenger_that_was_not_measured_on_one_that_is_wanted_leaves_the_decision_to_a_person(finished):
    finished("one", 0.6).submit()
    found = finished("two", 0.8).submit(None, None, True)
    assert not found.promoted and found.awaits_person and found.reasons[-1].code == "reference_missing"
    assert "the run was not measured on the reference set" in found.reason
