"""Promotion against a real MLflow on sqlite: decisions, races, crashes, hands, rollback."""

import threading

import numpy as np
import pytest

from kftrain import registry
from kftrain.core import storage
from kftrain.errors import ConfigError, EvaluationError, TrackingError
from kftrain.registry import journal
from kftrain.registry.journal import Journal
from kftrain.run import documents
from kftrain.run.documents import Registration
from kftrain.tracking import model_client


def journal_of(config):
    return Journal.of(config.run.storage_root, "toy").entries()


def changed(config, **registry_options):
    return config.model_copy(update={"registry": config.registry.model_copy(update=registry_options)})


def test_the_first_model_becomes_champion_and_says_so(config, finished, aliases):
    run = finished("one", 0.6)
    registration = run.submit()
    assert registration.promoted and registration.reason.startswith("first model: accuracy 0.6")
    assert documents.read(Registration, run.paths.registration) == registration
    assert aliases() == {"champion": 1}
    champion = registry.champion(config)
    assert (champion.version, champion.run_uri, champion.export_uri) == (1, run.paths.uri, run.completion.export_uri)
    assert champion.export_digest == run.completion.export_digest


def test_a_better_model_is_promoted_and_a_worse_one_refused_with_figures(config, finished, aliases):
    finished("one", 0.6).submit()
    better = finished("two", 0.7).submit()
    worse = finished("three", 0.65).submit()
    assert better.promoted and better.champion_version == 1 and better.improvement.low > 0
    assert not worse.promoted and worse.champion_version == 2
    assert worse.reason.startswith("worse: accuracy 0.7") and "improvement -0.05" in worse.reason
    assert aliases() == {"champion": 2, "previous_champion": 1}
    tags = model_client.get_version(config.tracking.uri, "toy", 3).tags
    assert tags["kftrain.promoted"] == "false" and tags["kftrain.gate"] == worse.reason


def test_without_a_champion_there_is_none(config):
    assert registry.champion(config) is None


def test_an_equal_model_is_not_significantly_better(finished):
    finished("one", 0.6).submit()
    registration = finished("two", 0.6).submit()
    assert not registration.promoted and registration.reason.startswith("not significantly better")


def test_a_champion_that_was_evaluated_differently_is_not_compared(config, finished, aliases):
    finished("one", 0.6, "a" * 64).submit()
    registration = finished("two", 0.9, "b" * 64).submit()
    assert not registration.promoted and "no evaluation on the same data" in registration.reason
    assert registration.reason.startswith("not promoted, a person decides: the champion, version 1,")
    assert (registration.champion, registration.improvement) == (None, None)
    assert registration.awaits_person and aliases() == {"champion": 1, "challenger": 2}


def test_manual_promotion_only_reports_and_a_person_decides(config, finished, aliases):
    finished("one", 0.6).submit()
    registration = finished("two", 0.7).submit(changed(config, promotion="manual"))
    assert not registration.promoted and "would be promoted" in registration.reason
    assert registration.awaits_person and aliases() == {"champion": 1, "challenger": 2}
    assert registry.promote(config, 2, "looks good").number == 2
    assert registry.promote(config, 2, "again").number == 2
    assert aliases() == {"champion": 2, "previous_champion": 1}
    with pytest.raises(TrackingError, match="no such version"):
        registry.promote(config, 9, "typo")


def test_gating_again_changes_nothing_and_answers_the_same(config, finished):
    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    first = run.submit()
    assert run.submit() == first
    assert [entry.version for entry in journal_of(config)] == [1, 2]


def test_an_unknown_metric_is_refused_before_anything_happens(config, finished):
    run = finished("one", 0.6)
    with pytest.raises(ConfigError, match="known: accuracy, error"):
        run.submit(changed(config, metric="f1"))
    assert journal_of(config) == []


def test_evaluation_files_that_changed_since_are_refused(finished):
    run = finished("one", 0.6)
    registered = run.register()
    folder = run.paths.evaluation(run.completion.checkpoint_digest, "e" * 64)
    content = storage.read_bytes(storage.join(folder, "statistics.npz"))
    storage.publish(storage.join(folder, "statistics.npz"), content[:-1] + b"x")
    with pytest.raises(EvaluationError, match="not those of"):
        run.gate(registered)
    storage.publish(storage.join(folder, "statistics.npz"), content)
    better = run.evaluation.model_copy(update={"num_samples": 1})
    storage.publish_json(storage.join(folder, "metrics.json"), better.to_dict())
    with pytest.raises(EvaluationError, match="changed since"):
        run.gate(registered)


def test_an_export_that_was_exchanged_after_the_evaluation_is_not_promoted(config, finished):
    run = finished("one", 0.6)
    registered = run.register()
    manifest = storage.join(run.completion.export_uri, "manifest.json")
    storage.publish(manifest, storage.read_text(manifest).replace("bytes", "bytez"))
    with pytest.raises(TrackingError, match="not the expected one"):
        run.gate(registered)
    assert journal_of(config) == []


@pytest.mark.parametrize("round_", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))])
def test_of_promotions_at_once_the_best_wins_and_the_champion_never_gets_worse(config, finished, aliases, round_):
    qualities = np.random.default_rng(round_).permutation(np.linspace(0.5, 0.9, 8))
    contenders = [(run, run.register()) for run in (finished(f"run-{i}", q) for i, q in enumerate(qualities))]
    quality_of = {registered.version: q for (_, registered), q in zip(contenders, qualities, strict=True)}
    barrier, failures = threading.Barrier(8), []

    def contend(run, registered):
        barrier.wait(240)
        try:
            run.gate(registered)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=contend, args=contender) for contender in contenders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(400)
    assert failures == []
    history = [quality_of[entry.version] for entry in journal_of(config)]
    assert history == sorted(history) and history[-1] == max(qualities)
    assert {entry.kind for entry in journal_of(config)} == {"promote"}
    assert quality_of[aliases()["champion"]] == max(qualities)
    assert registry.audit(config) == [] and Journal.of(config.run.storage_root, "toy").writers() == []


def crash_at_alias(monkeypatch):
    def crash(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(model_client, "set_alias", crash)


def test_a_crash_between_journal_and_alias_is_repaired_by_the_next_promotion(config, finished, aliases, monkeypatch):
    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    registered = run.register()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        crash_at_alias(patch)
        run.gate(registered)
    assert aliases() == {"champion": 1}
    assert registry.champion(config).version == 2
    assert "lagging" in registry.audit(config)[0].problem
    refused = finished("three", 0.65).submit()
    assert refused.champion_version == 2 and not refused.promoted
    assert aliases() == {"champion": 2, "previous_champion": 1}
    assert [entry.kind for entry in journal_of(config)] == ["promote", "promote"]
    assert run.gate(registered).promoted


def test_the_mark_of_a_writer_that_died_is_removed_in_the_end(config, finished, monkeypatch):
    run = finished("one", 0.6)
    registered = run.register()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        crash_at_alias(patch)
        run.gate(registered)
    monkeypatch.setattr(journal, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(journal, "WATCH_SECONDS", 0.5)
    registry.remove_dead_writers(config)
    assert len(Journal.of(config.run.storage_root, "toy").writers()) == 1, "alias and journal do not agree yet"
    run.gate(registered)
    registry.remove_dead_writers(config)
    assert Journal.of(config.run.storage_root, "toy").writers() == []


def test_a_slow_writer_cannot_leave_an_old_alias(config, finished, aliases, monkeypatch):
    finished("one", 0.6).submit()
    slow, fast = finished("slow", 0.7), finished("fast", 0.8)
    slow_version, fast_version = slow.register(), fast.register()
    original = model_client.set_alias
    overtaken = []

    def overtake(uri, name, aliased, version):
        if not overtaken:
            overtaken.append(True)
            assert fast.gate(fast_version).promoted
        original(uri, name, aliased, version)

    monkeypatch.setattr(model_client, "set_alias", overtake)
    assert slow.gate(slow_version).promoted
    assert [entry.version for entry in journal_of(config)] == [1, slow_version.version, fast_version.version]
    assert aliases() == {"champion": fast_version.version, "previous_champion": slow_version.version}


def test_the_decision_is_made_again_if_somebody_was_faster(config, finished, aliases, monkeypatch):
    finished("one", 0.6).submit()
    late, winner = finished("late", 0.7), finished("winner", 0.8)
    late_version, winner_version = late.register(), winner.register()
    original = Journal.append
    beaten = []

    def append(self, entry):
        if not beaten:
            beaten.append(entry.number)
            assert winner.gate(winner_version).promoted
        original(self, entry)

    monkeypatch.setattr(Journal, "append", append)
    registration = late.gate(late_version)
    assert not registration.promoted and registration.champion_version == winner_version.version
    assert aliases()["champion"] == winner_version.version and beaten == [2]


def test_a_change_by_hand_is_entered_and_is_the_champion_to_beat(config, finished, aliases):
    finished("one", 0.8).submit()
    finished("two", 0.6).submit()
    model_client.set_alias(config.tracking.uri, "toy", "champion", 2)
    assert registry.champion(config).version == 2
    registration = finished("three", 0.7).submit()
    assert registration.promoted and registration.champion_version == 2
    assert [(entry.kind, entry.version) for entry in journal_of(config)] == [
        ("promote", 1),
        ("external", 2),
        ("promote", 3),
    ]


def test_a_champion_that_was_deleted_is_found_and_replaced(config, finished, aliases):
    finished("one", 0.6).submit()
    finished("two", 0.7).submit()
    model_client.delete_version(config.tracking.uri, "toy", 2)
    assert any("deleted" in finding.problem for finding in registry.audit(config))
    assert registry.rollback(config).version == 1
    assert aliases() == {"champion": 1}
    assert registry.audit(config) == []


def test_rollback_restores_one_champion_after_the_other(config, finished, aliases):
    for name, quality in (("one", 0.6), ("two", 0.7), ("three", 0.8)):
        finished(name, quality).submit()
    entry = registry.rollback(config)
    assert (entry.kind, entry.version, entry.previous) == ("rollback", 2, 3)
    assert aliases() == {"champion": 2, "previous_champion": 1}
    assert registry.rollback(config).version == 1
    assert aliases() == {"champion": 1}
    with pytest.raises(TrackingError, match="no earlier champion"):
        registry.rollback(config)


def test_rollback_passes_over_a_champion_whose_export_is_gone(config, finished):
    runs = [finished(name, quality) for name, quality in (("one", 0.6), ("two", 0.7), ("three", 0.8))]
    for run in runs:
        run.submit()
    storage.remove(runs[1].completion.export_uri)
    assert registry.rollback(config).version == 1


def test_audit_finds_exports_that_are_gone_damaged_or_foreign(config, finished):
    runs = [finished(name, 0.6) for name in ("one", "two", "three")]
    for run in runs:
        run.submit()
    assert registry.audit(config, contents=True) == []
    storage.remove(runs[0].completion.export_uri)
    weights = storage.join(runs[1].completion.export_uri, "model.safetensors")
    storage.publish(weights, storage.read_bytes(weights).replace(b"tensors", b"poison!"))
    assert [(f.version, "no export here" in f.problem) for f in registry.audit(config)] == [(1, True)]
    assert [f.version for f in registry.audit(config, contents=True)] == [1, 2]
