"""A person declines a challenger: it is no champion, however often the gate is asked, until a person promotes it."""

import pytest

from kftrain import registry
from kftrain.errors import TrackingError
from kftrain.registry.journal import Journal
from kftrain.registry.promotion import find_decline
from kftrain.registry.tries import Tries
from kftrain.tracking import model_client


def changed(config, **registry_options):
    return config.model_copy(update={"registry": config.registry.model_copy(update=registry_options)})


def test_a_declined_challenger_loses_its_alias_and_says_why(config, finished, aliases):
    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    manual = changed(config, promotion="manual")
    assert run.submit(manual).awaits_person and aliases() == {"champion": 1, "challenger": 2}
    said = registry.decline(config, 2, "worse on names")
    assert aliases() == {"champion": 1} and said.export_digest == run.completion.export_digest
    tags = model_client.get_version(config.tracking.uri, "toy", 2).tags
    assert (tags["kftrain.gate"], tags["kftrain.promoted"]) == ("declined by hand: worse on names", "false")
    assert registry.decline(config, 2, "again").reason == "worse on names"
    assert registry.audit(config) == []


def test_the_gate_leaves_a_declined_one_alone_and_counts_no_try_more(config, finished, aliases):
    first = finished("one", 0.6)
    first.submit()
    run = finished("two", 0.7)
    run.submit(changed(config, promotion="manual"))
    registry.decline(config, 2, "worse on names")
    again = run.submit()
    assert not again.promoted and not again.awaits_person and aliases() == {"champion": 1}
    assert again.reason == "not promoted, declined by hand: worse on names" and again.improvement.low > 0
    assert [each.code for each in again.reasons][:2] == ["declined", "better"]
    assert [
        each.number for each in Tries.of(config.run.storage_root, "toy", first.completion.export_digest).read_all()
    ] == [1]
    assert finished("three", 0.7).submit().promoted  # what the others are


def test_a_person_may_promote_it_after_all(config, finished, aliases):
    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    run.submit(changed(config, promotion="manual"))
    registry.decline(config, 2, "worse on names")
    registry.promote(config, 2, "names were wrong")
    assert aliases()["champion"] == 2 and run.submit().promoted
    entries = Journal.of(config.run.storage_root, "toy").entries()
    assert find_decline(config, entries, run.completion.export_digest) is None


def test_neither_the_champion_nor_what_is_not_there_is_declined(config, finished):
    finished("one", 0.6).submit()
    with pytest.raises(TrackingError, match="champion cannot be declined"):
        registry.decline(config, 1, "no")
    with pytest.raises(TrackingError, match="no such version"):
        registry.decline(config, 9, "no")


def test_a_rollback_passes_over_a_declined_one(config, finished, aliases):
    for number, name in enumerate(("one", "two", "three")):
        finished(name, 0.6 + number / 10).submit()
    registry.decline(config, 2, "it answers rudely")
    assert registry.rollback(config).version == 1 and aliases()["champion"] == 1
