"""A champion that was deleted, unnamed or cannot be measured is not forgotten: nothing worse takes its place."""

import pytest

from kftrain import registry
from kftrain.core import storage
from kftrain.errors import TrackingError
from kftrain.registry import lineage
from kftrain.registry.champion_alias import JOURNAL_TAG, ChampionAlias
from kftrain.registry.journal import Journal
from kftrain.run.documents import Unmeasured
from kftrain.tracking import model_client


def journal_of(config):
    return [(entry.kind, entry.version) for entry in Journal.of(config.run.storage_root, "toy").entries()]


def remove_alias(config):
    model_client.set_alias(config.tracking.uri, "toy", "champion", None)


def test_a_worse_model_does_not_win_because_the_alias_was_removed(config, finished, aliases):
    finished("one", 0.8).submit()
    remove_alias(config)
    worse = finished("two", 0.6).submit()
    assert not worse.promoted and worse.champion_version == 1 and worse.former_champion
    assert worse.reason.startswith("the champion was deleted or lost its alias, compared with version 1")
    assert "worse: accuracy 0.8" in worse.reason and aliases() == {"previous_champion": 1}
    better = finished("three", 0.9).submit()
    assert better.promoted and aliases() == {"champion": 3, "previous_champion": 1}
    assert journal_of(config) == [("promote", 1), ("external", None), ("promote", 3)]


def test_fault_71_after_a_deletion_the_last_champion_that_is_left_is_the_one_to_beat(config, finished, aliases):
    for name, quality in (("one", 0.6), ("two", 0.7), ("three", 0.8)):
        finished(name, quality).submit()
    model_client.delete_version(config.tracking.uri, "toy", 3)
    assert (3, True) in [(finding.version, "was deleted" in finding.problem) for finding in registry.audit(config)]
    assert registry.champion(config).version == 2, "the evaluation must score what the gate compares with"
    worse = finished("four", 0.65).submit()
    assert not worse.promoted and worse.champion_version == 2
    better = finished("five", 0.75).submit()
    assert better.promoted and better.champion_version == 2
    assert aliases() == {"champion": 5, "previous_champion": 2}


def test_fault_71_with_no_former_champion_left_a_person_decides(config, finished, aliases):
    finished("one", 0.8).submit()
    model_client.delete_version(config.tracking.uri, "toy", 1)
    assert registry.champion(config) is None
    alone = finished("two", 0.9).submit()
    assert not alone.promoted and alone.champion_version is None and alone.identical is False
    assert alone.reason.startswith("not promoted, a person decides: the champion was deleted or lost its alias")
    registry.promote(config, 2, "it is good")
    assert aliases() == {"champion": 2}


def test_a_former_champion_that_was_measured_otherwise_is_passed_over(config, finished):
    finished("one", 0.6).submit()
    finished("two", 0.7).submit()
    reference = lineage.find_reference(config.tracking.uri, model_client.get_version(config.tracking.uri, "toy", 2))
    remove_alias(config)
    storage.remove(f"{reference.run_uri}/evaluation")
    registration = finished("three", 0.65).submit()
    assert registration.promoted and registration.champion_version == 1 and registration.former_champion


def test_a_champion_that_cannot_be_measured_is_not_passed_over(config, finished, aliases):
    finished("one", 0.6).submit()
    two = finished("two", 0.7)
    two.submit()
    storage.publish(f"{two.paths.uri}/evaluation/{two.completion.checkpoint_digest[:16]}/{'e' * 16}/metrics.json", "{")
    registration = finished("three", 0.65).submit()
    assert not registration.promoted and aliases()["champion"] == 2
    assert "the champion, version 2, has no evaluation" in registration.reason


def test_a_registered_model_that_was_made_anew_does_not_lend_its_numbers_to_old_champions(config, finished, aliases):
    import mlflow

    finished("one", 0.8).submit()
    finished("two", 0.9).submit()
    mlflow.MlflowClient(registry_uri=config.tracking.uri).delete_registered_model("toy")
    first = finished("three", 0.5).submit()
    second = finished("four", 0.6).submit()
    assert (first.version, second.version) == (1, 2)
    for registration in (first, second):
        assert not registration.promoted and registration.champion_version is None
    assert aliases() == {"challenger": 2}
    with pytest.raises(TrackingError, match="no earlier champion"):
        registry.rollback(config)


def test_the_first_model_is_promoted_however_few_groups_there_are(config, finished):
    few = config.model_copy(update={"registry": config.registry.model_copy(update={"min_groups": 61})})
    assert finished("one", 0.6).submit(few).promoted
    registration = finished("two", 0.7).submit(few)
    assert not registration.promoted
    assert registration.reason.startswith("would be promoted, but 60 groups are too few to decide without a person")
    assert finished("three", 0.7).submit().promoted, "60 are enough by default"


def test_a_byte_that_was_flipped_after_the_evaluation_is_not_promoted(config, finished, aliases):
    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    registered = run.register()
    weights = storage.join(run.completion.export_uri, "model.safetensors")
    content = bytearray(storage.read_bytes(weights))
    content[3] ^= 1
    storage.publish(weights, bytes(content))
    with pytest.raises(TrackingError, match="sha256"):
        run.gate(registered)
    with pytest.raises(TrackingError, match="sha256"):
        registry.promote(config, 2, "by hand")
    assert journal_of(config) == [("promote", 1)] and aliases() == {"champion": 1}


def test_a_rollback_passes_over_a_champion_with_a_flipped_byte(config, finished):
    runs = [finished(name, quality) for name, quality in (("one", 0.6), ("two", 0.7), ("three", 0.8))]
    for run in runs:
        run.submit()
    weights = storage.join(runs[1].completion.export_uri, "model.safetensors")
    storage.publish(weights, storage.read_bytes(weights).replace(b"tensors", b"poison!"))
    assert registry.rollback(config).version == 1


def at_root(config, root):
    return config.model_copy(update={"run": config.run.model_copy(update={"storage_root": str(root)})})


def test_two_storage_roots_under_one_registered_model_are_refused(config, finished, finish, aliases, tmp_path):
    finished("one", 0.8).submit()
    other = at_root(config, tmp_path / "other")
    stranger = finish(other, "two", 0.9)
    with pytest.raises(TrackingError, match="belongs to another storage root") as raised:
        stranger.register()
    assert str(tmp_path / "root") in raised.value.line and JOURNAL_TAG in raised.value.fix
    for action in (lambda: registry.champion(other), lambda: registry.rollback(other)):
        with pytest.raises(TrackingError, match="belongs to another storage root"):
            action()
    assert registry.audit(other)[0].version is None
    assert aliases() == {"champion": 1} and len(model_client.search_versions(config.tracking.uri, "toy")) == 1


def test_a_root_that_moved_is_adopted_by_its_tag(config, finished, finish, aliases, tmp_path):
    finished("one", 0.8).submit()
    (tmp_path / "root").rename(tmp_path / "moved")
    moved = at_root(config, tmp_path / "moved")
    uri = f"{tmp_path}/moved/registry/toy"
    model_client.set_registered_model_tag(config.tracking.uri, "toy", JOURNAL_TAG, uri)
    registration = finish(moved, "two", 0.9).submit()
    assert not registration.promoted, "the reference of version 1 names the old place: it cannot be measured"
    assert registration.champion_version == 1 and aliases() == {"champion": 1, "challenger": 2}


def test_a_model_of_an_older_kftrain_is_tied_to_the_root_of_its_champion(config, finished, finish, tmp_path):
    import mlflow

    finished("one", 0.8).submit()
    mlflow.MlflowClient(registry_uri=config.tracking.uri).delete_registered_model_tag("toy", JOURNAL_TAG)
    with pytest.raises(TrackingError, match="belongs to another storage root"):
        finish(at_root(config, tmp_path / "other"), "two", 0.9).register()
    assert finished("three", 0.9).submit().promoted
    assert (
        model_client.get_registered_model(config.tracking.uri, "toy").tags[JOURNAL_TAG]
        == f"{tmp_path}/root/registry/toy"
    )


def test_edited_tags_decide_nothing_and_audit_reports_them(config, finished, finish, aliases):
    uri = config.tracking.uri
    one, two = finished("one", 0.8), finished("two", 0.6)
    one.submit(), two.submit()
    lies = {
        "kftrain.run_uri": two.paths.uri,
        "kftrain.export_uri": "http://169.254.169.254/latest",
        "kftrain.export_digest": two.completion.export_digest,
        "kftrain.checkpoint_digest": two.completion.checkpoint_digest,
        "kftrain.logged_model_id": "m-00000000000000000000000000000000",
    }
    model_client.set_version_tags(uri, "toy", 1, lies)
    found = registry.champion(config)
    assert (found.run_uri, found.export_uri) == (one.paths.uri, one.completion.export_uri)
    registration = finished("three", 0.7).submit()
    assert not registration.promoted and registration.champion.value == pytest.approx(0.8, abs=0.01)
    [finding] = registry.audit(config)
    assert finding.version == 1
    for name in lies:
        assert name in finding.problem
    assert two.register().version == 2


def test_tags_of_a_logged_model_do_not_make_another_export_of_a_version(config, finished):
    uri = config.tracking.uri
    one, two = finished("one", 0.8), finished("two", 0.9)
    first = one.register()
    model_client.set_logged_model_tags(
        uri, first.logged_model_id, {"kftrain.export_digest": two.completion.export_digest}
    )
    model_client.set_version_tags(uri, "toy", 1, {"kftrain.export_digest": two.completion.export_digest})
    second = two.register()
    assert second.version == 2 and second.logged_model_id != first.logged_model_id
    assert (
        lineage.read_reference(uri, model_client.get_version(uri, "toy", 2)).export_digest
        == two.completion.export_digest
    )


def test_a_champion_whose_kind_is_not_allowed_leaves_the_decision_to_a_person(config, finished, aliases):
    finished("one", 0.6, "a" * 64).submit()
    run = finished("two", 0.9, "b" * 64)
    why = Unmeasured(
        evaluation_digest="b" * 64, export_digest=registry.champion(config).export_digest, reason="os:system, no"
    )
    storage.publish_json(run.paths.unmeasured, why.to_dict())
    registration = run.submit()
    assert not registration.promoted and aliases() == {"champion": 1, "challenger": 2}
    assert registration.reason.startswith("not promoted, a person decides: the champion, version 1,")
    assert registration.reason.endswith("(os:system, no)")


def make_anew(config, finished, alias=None):
    """The registered model is deleted and made again: version 1 is another model. Returns its run and version."""
    import mlflow

    finished("one", 0.8).submit()
    client = mlflow.MlflowClient(registry_uri=config.tracking.uri)
    client.delete_registered_model("toy")
    run = finished("anew", 0.5)
    registered = run.register()
    if alias:
        client.set_registered_model_alias("toy", alias, registered.version)
    assert registered.version == 1
    return run, registered


def test_another_model_of_the_champions_number_is_not_the_champion(config, finished):
    run, registered = make_anew(config, finished, "champion")
    found = run.gate(registered)
    assert not found.promoted and found.awaits_person and "no evaluation on the same data" in found.reason
    entry = registry.promote(config, 1, "it is the one")
    assert (entry.number, entry.export_digest) == (2, registered.export_digest)
    assert run.gate(registered).promoted and registry.promote(config, 1, "again").number == 2


def test_a_promotion_that_died_gives_the_alias_to_no_other_model_of_its_number(config, finished, aliases):
    make_anew(config, finished)
    alias = ChampionAlias.of(config)
    storage.create_json(f"{alias.journal.uri}/writers/died.json", {"beat": 0})
    alias._repair()
    assert "champion" not in aliases()
    assert [(each.kind, each.version) for each in alias.settle()] == [("promote", 1), ("external", None)]
    assert "champion" not in aliases()
