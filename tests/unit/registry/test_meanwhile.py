"""What people decide while the gate reads an export, and what they took back, is not undone by a register step."""

import pytest

from kftrain import registry
from kftrain.errors import TrackingError
from kftrain.registry import promotion
from kftrain.registry.journal import Journal
from kftrain.tracking import model_client


def journal_of(config):
    return [(entry.kind, entry.version) for entry in Journal.of(config.run.storage_root, "toy").entries()]


def meanwhile(monkeypatch, act):
    """Calls `act` once, when an export is read to be promoted."""
    read, calls = promotion.require_export, []

    def reading(*arguments, contents=False):
        if contents and not calls:
            calls.append(1)
            act()
        read(*arguments, contents=contents)

    monkeypatch.setattr(promotion, "require_export", reading)


def test_what_is_declined_while_the_gate_reads_it_is_no_champion(config, finished, aliases, monkeypatch):
    finished("one", 0.6).submit()
    run = finished("two", 0.9)
    registered = run.register()
    meanwhile(monkeypatch, lambda: registry.decline(config, 2, "it answers rudely"))
    registration = run.gate(registered)
    assert (registration.promoted, registration.reason) == (False, "not promoted, declined by hand: it answers rudely")
    assert aliases() == {"champion": 1} and journal_of(config) == [("promote", 1), ("decline", 1)]
    assert registry.audit(config) == []


def test_the_first_model_may_be_declined_while_it_is_read(config, finished, aliases, monkeypatch):
    run = finished("one", 0.6)
    registered = run.register()
    meanwhile(monkeypatch, lambda: registry.decline(config, 1, "no"))
    assert not run.gate(registered).promoted and aliases() == {}
    assert registry.champion(config) is None
    assert finished("two", 0.6).submit().promoted, "another one is the first model then"


def test_what_became_champion_first_is_not_declined(config, finished, aliases, monkeypatch):
    """The gate is faster: the person is told so, and nothing of the decline stays."""
    finished("one", 0.6).submit()
    run = finished("two", 0.9)
    registered = run.register()
    append, calls = Journal.append, []

    def appending(self, entry):
        if entry.kind == "decline" and not calls:
            calls.append(1)
            assert run.gate(registered).promoted
        append(self, entry)

    monkeypatch.setattr(Journal, "append", appending)
    with pytest.raises(TrackingError, match="champion cannot be declined"):
        registry.decline(config, 2, "no")
    assert calls and run.gate(registered).promoted and aliases()["champion"] == 2


def test_declines_are_no_steps_of_a_rollback_and_a_champion_keeps_its_reason(config, finished, aliases):
    runs = [finished(name, quality) for name, quality in (("one", 0.6), ("two", 0.7), ("three", 0.5))]
    first = [run.submit() for run in runs][1]
    registry.decline(config, 3, "worse on names")
    again = runs[1].submit()
    assert (again.reason, again.improvement, again.champion_version) == (first.reason, first.improvement, 1)
    assert registry.promote(config, 2, "it stays").number == 2
    assert registry.rollback(config).version == 1 and aliases() == {"champion": 1}


def test_a_decline_of_before_in_a_document_of_its_own_counts_until_somebody_promotes(config, finished):
    from kftrain.core import storage

    finished("one", 0.6).submit()
    run = finished("two", 0.9)
    registered = run.register()
    digest = registered.export_digest
    said = {
        "schema_version": 1,
        "version": 2,
        "export_digest": digest,
        "reason": "old",
        "time": "2026",
        "entry_id": "x",
    }
    storage.publish_json(f"{config.run.storage_root}/registry/toy/declined/{digest[:16]}.json", said)
    assert run.gate(registered).reason == "not promoted, declined by hand: old"
    registry.promote(config, 2, "after all")
    assert promotion.find_decline(config, Journal.of(config.run.storage_root, "toy").entries(), digest) is None


def test_a_rollback_is_not_undone_when_the_same_step_runs_again(config, finished, aliases):
    for name, quality in (("one", 0.6), ("two", 0.7)):
        finished(name, quality).submit()
    run = finished("three", 0.8)
    registered = run.register()
    run.gate(registered)
    registry.rollback(config)
    again = run.gate(registered)
    assert not again.promoted and not again.awaits_person and aliases()["champion"] == 2
    assert again.reason == "not promoted, taken back by hand: rolled back from version 3"
    registry.rollback(config)
    assert not run.gate(registered).promoted and aliases()["champion"] == 1
    registry.promote(config, 3, "it was the data")
    assert run.gate(registered).promoted and aliases()["champion"] == 3
    assert finished("four", 0.95).submit().promoted


def test_a_change_by_hand_is_not_undone_either(config, finished, aliases):
    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    run.submit()
    model_client.set_alias(config.tracking.uri, "toy", "champion", 1)
    assert not run.submit().promoted and aliases()["champion"] == 1


def test_an_alias_that_is_moved_by_hand_while_an_export_is_read_counts(config, finished, aliases, monkeypatch):
    for name, quality in (("one", 0.6), ("two", 0.9)):
        finished(name, quality).submit()
    registry.rollback(config)
    run = finished("three", 0.8)
    registered = run.register()
    meanwhile(monkeypatch, lambda: model_client.set_alias(config.tracking.uri, "toy", "champion", 2))
    registration = run.gate(registered)
    assert (registration.promoted, registration.champion_version) == (False, 2)
    assert aliases()["champion"] == 2 and journal_of(config)[-1] == ("external", 2)
