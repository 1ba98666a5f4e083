"""The same weights from another run are no new version."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kftrain import registry
from kftrain.core import storage
from kftrain.registry.journal import Journal
from kftrain.tracking import client, model_client


@pytest.fixture
def repeat(config, finish):
    """A run that trained the same weights as `run`, as a recurring one on the same data does: another checkpoint."""

    def again(run, name, quality):
        other = finish(config, name, quality)
        source, target = run.completion.export_uri, other.completion.export_uri
        storage.remove(target)
        manifest = storage.read_json(storage.join(source, "manifest.json"))
        for file in manifest["files"]:
            storage.publish(storage.join(target, file), storage.read_bytes(storage.join(source, file)))
        manifest["checkpoint_digest"] = other.completion.checkpoint_digest
        storage.publish_json(storage.join(target, "manifest.json"), manifest)
        digest = storage.sha256_file(storage.join(target, "manifest.json"))
        completion = other.completion.model_copy(update={"export_digest": digest})
        evaluation = other.evaluation.model_copy(update={"export_digest": digest})
        folder = other.paths.evaluation(completion.checkpoint_digest, evaluation.evaluation_digest)
        storage.publish_json(storage.join(folder, "metrics.json"), evaluation.to_dict())
        return dataclasses.replace(other, completion=completion, evaluation=evaluation)

    return again


def versions(config):
    return [version.version for version in model_client.search_versions(config.tracking.uri, "toy")]


def num_entries(config):
    return len(Journal.of(config.run.storage_root, "toy").entries())


def test_the_champion_trained_again_is_no_new_version(config, finished, repeat, aliases):
    first = finished("monday", 0.7)
    first.submit()
    again = repeat(first, "tuesday", 0.7)
    assert again.completion.export_digest != first.completion.export_digest
    registration = again.submit()
    assert registration.identical and registration.version == 1 and not registration.promoted
    assert registration.reason == "identical to version 1, which is champion: nothing was registered"
    assert again.submit() == registration and versions(config) == [1] and num_entries(config) == 1
    assert model_client.get_version(config.tracking.uri, "toy", 1).tags["kftrain.promoted"] == "true"
    tags = client.read_run(config.tracking.uri, again.mlflow_run_id).tags
    assert tags["kftrain.registered_version"] == "toy/1" and tags["kftrain.gate"] == registration.reason


def test_a_champion_that_was_rolled_back_does_not_come_back_by_training_it_again(config, finished, repeat, aliases):
    finished("one", 0.6).submit()
    bad = finished("two", 0.7)
    bad.submit()
    registry.rollback(config)
    registration = repeat(bad, "three", 0.7).submit()
    assert registration.reason.startswith("identical to version 2, which was champion before")
    assert aliases()["champion"] == 1 and versions(config) == [1, 2]


def test_a_version_that_was_never_judged_is_judged_when_it_is_trained_again(config, finished, repeat, aliases):
    first = finished("one", 0.6)
    first.register()
    registration = repeat(first, "two", 0.6).submit()
    assert registration.promoted and registration.version == 1 and aliases() == {"champion": 1}
    assert registration.reason.startswith("identical to version 1, nothing was registered: first model")


def test_equal_exports_of_two_runs_that_are_registered_at_once_are_one_version(config, finished, repeat, monkeypatch):
    """Each run makes a model of its own before it looks for it: the newest one is the other's."""
    first = finished("monday", 0.7)
    again = repeat(first, "tuesday", 0.7)
    digest = first.completion.export_digest
    barrier, create = threading.Barrier(2), model_client.create_logged_model

    def together(*arguments, **options):
        model_id = create(*arguments, **options)
        barrier.wait(60)
        return model_id

    # As two runs have it that train the same from the same checkpoint digest: the manifests are equal, too.
    source, target = first.completion.export_uri, again.completion.export_uri
    storage.publish(storage.join(target, "manifest.json"), storage.read_bytes(storage.join(source, "manifest.json")))
    again = dataclasses.replace(
        again,
        completion=again.completion.model_copy(update={"export_digest": digest}),
        evaluation=again.evaluation.model_copy(update={"export_digest": digest}),
    )
    monkeypatch.setattr(model_client, "create_logged_model", together)
    with ThreadPoolExecutor(2) as threads:
        registered = list(threads.map(lambda run: run.register(), (first, again)))
    assert [one.version for one in registered] == [1, 1] and versions(config) == [1]


def test_an_identical_version_whose_export_is_gone_does_not_count(config, finished, repeat):
    first = finished("one", 0.6)
    first.submit()
    again = repeat(first, "two", 0.6)
    storage.remove(first.completion.export_uri)
    assert again.register().version == 2
    assert not again.register().identical


def test_a_version_of_an_older_kftrain_is_recognised_and_works(config, finished, repeat, aliases):
    """It has all digests as tags, and no digest of its content."""
    import mlflow

    first = finished("one", 0.6)
    registered = first.register()
    reader = mlflow.MlflowClient(tracking_uri=config.tracking.uri, registry_uri=config.tracking.uri)
    old = {key: value for key, value in reader.get_logged_model(registered.logged_model_id).tags.items()}
    reader.delete_model_version_tag("toy", "1", "kftrain.content_digest")
    model_client.set_version_tags(config.tracking.uri, "toy", 1, old)
    assert first.submit().promoted and registry.champion(config).version == 1
    assert repeat(first, "two", 0.6).register().version == 1
    assert registry.audit(config) == [] and versions(config) == [1]


def test_declined_weights_stay_declined_when_their_version_is_gone(config, finished, repeat, aliases):
    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    manual = config.model_copy(update={"registry": config.registry.model_copy(update={"promotion": "manual"})})
    run.submit(manual)
    registry.decline(config, 2, "worse on names")
    model_client.delete_version(config.tracking.uri, "toy", 2)
    found = repeat(run, "three", 0.7).submit()
    assert not found.identical and not found.promoted and "declined by hand: worse on names" in found.reason
    registry.promote(config, found.version, "after all")
    assert aliases()["champion"] == found.version


def test_weights_that_were_promoted_after_all_are_declined_no_more(config, finished, repeat):
    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    registry.decline(config, run.register().version, "worse on names")
    registry.promote(config, 2, "after all")
    registry.rollback(config)
    model_client.delete_version(config.tracking.uri, "toy", 2)
    assert repeat(run, "three", 0.7).submit().reasons[0].code != "declined"
