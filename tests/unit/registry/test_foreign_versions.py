"""Versions that others have made of the same registered model, with their files anywhere: they stop nobody."""

import dataclasses

import pytest

from kftrain import registry
from kftrain.errors import MlflowError
from kftrain.registry.reference import EXPORT_DIGEST_TAG, FILE_NAME
from kftrain.tracking import model_client

PLACES = ("foo://x/y", "http://127.0.0.1:1/x", "b2://x/y", "sftp://127.0.0.1:1/x", "ftp://127.0.0.1:1/x", "dbfs:/x", "")


def add_foreign(config, place, tags=None):
    """A version of a LoggedModel of an experiment with this artifact location; '': MLflow's own choice."""
    import mlflow

    uri = config.tracking.uri
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.create_experiment(f"at {place}", artifact_location=place or None)
    model = client.create_logged_model(experiment, name="theirs", tags=tags)
    client.finalize_logged_model(model.model_id, "READY")
    return client.create_model_version(
        "toy", f"models:/{model.model_id}", model_id=model.model_id, await_creation_for=0
    )


@pytest.mark.parametrize("place", PLACES)
def test_a_foreign_version_stops_neither_audit_nor_champion_nor_gate(config, finished, aliases, place):
    import mlflow

    finished("one", 0.6).submit()
    with mlflow.tracking._tracking_service.utils._use_tracking_uri(config.tracking.uri):
        add_foreign(config, place)
    [finding] = registry.audit(config)
    assert finding.version == 2 and "not registered by kftrain" in finding.problem
    assert registry.champion(config).version == 1
    assert finished("two", 0.7).submit().promoted and aliases()["champion"] == 3


@pytest.mark.parametrize("place", PLACES[1:4])
def test_one_that_says_that_it_is_ours_where_nobody_can_read_is_one_line(config, finished, place):
    import mlflow

    finished("one", 0.6).submit()
    with mlflow.tracking._tracking_service.utils._use_tracking_uri(config.tracking.uri):
        add_foreign(config, place, {EXPORT_DIGEST_TAG: "d" * 64})
    with pytest.raises(MlflowError, match=r"cannot read reference\.json of the model"):
        registry.audit(config)


@pytest.mark.parametrize("place", ["foo://x/y", "models:/m-1", "runs:/r/x", "folder"])
def test_one_whose_place_is_none_is_its_own_finding(config, finished, tmp_path, monkeypatch, place):
    import mlflow

    finished("one", 0.6).submit()
    (tmp_path / "theirs" / FILE_NAME).mkdir(parents=True)
    with mlflow.tracking._tracking_service.utils._use_tracking_uri(config.tracking.uri):
        add_foreign(config, None, {EXPORT_DIGEST_TAG: "d" * 64})
    found, theirs = model_client.get_logged_model, place.replace("folder", str(tmp_path / "theirs"))

    def get_logged_model(uri, model_id):
        model = found(uri, model_id)
        return dataclasses.replace(model, artifact_uri=theirs) if model.tags[EXPORT_DIGEST_TAG] == "d" * 64 else model

    monkeypatch.setattr(model_client, "get_logged_model", get_logged_model)
    [finding] = registry.audit(config)
    assert finding.version == 2 and "has no reference.json" in finding.problem
    assert finished("two", 0.7).submit().promoted
