"""Registering by reference against a real MLflow on sqlite."""

import itertools
import sys
import threading
import types
from pathlib import Path

import pytest

from kftrain import registry
from kftrain.core import storage
from kftrain.errors import EvaluationError, TrackingError
from kftrain.registry.reference import require_export
from kftrain.run import commit, export
from kftrain.tracking import client, model_client


def versions(config):
    return model_client.search_versions(config.tracking.uri, "toy")


def test_a_version_refers_to_the_export_and_its_logged_model_carries_every_digest(
    config, finished, monkeypatch, tmp_path
):
    import mlflow

    monkeypatch.setenv("KFTRAIN_GIT_COMMIT", "abc123")
    run = finished("one", 0.6)
    registered = run.register()
    [version] = versions(config)
    assert version.source == f"models:/{registered.logged_model_id}"
    files = storage.read_json(storage.join(run.completion.export_uri, "manifest.json"))["files"]
    assert version.tags == {
        "kftrain.run_id": "one",
        "kftrain.content_digest": storage.digest_json(files),
        "kftrain.dataset_digest": run.completion.dataset_digest,
        "kftrain.task": "language_modeling",
        "kftrain.model": "transformer",
    }
    reader = mlflow.MlflowClient(tracking_uri=config.tracking.uri)
    model = reader.get_logged_model(registered.logged_model_id)
    assert {name: value for name, value in model.tags.items() if name.startswith("kftrain.")} == {
        "kftrain.export_uri": run.completion.export_uri,
        "kftrain.export_digest": run.completion.export_digest,
        "kftrain.run_uri": run.paths.uri,
        "kftrain.run_id": "one",
        "kftrain.checkpoint_digest": run.completion.checkpoint_digest,
        "kftrain.dataset_digest": "d" * 64,
        "kftrain.training_digest": run.completion.training_digest,
        "kftrain.evaluation_digest": "e" * 64,
        "kftrain.git_commit": "abc123",
        "kftrain.task": "language_modeling",
        "kftrain.model": "transformer",
    }
    assert sorted(path.name for path in Path(model.artifact_location).iterdir()) == ["MLmodel", "reference.json"]
    assert {m.key: m.value for m in model.metrics} == {
        f"evaluation/{name}": interval.value for name, interval in run.evaluation.metrics.items()
    }


def test_registering_changes_neither_the_default_uri_nor_the_environment(finished, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    finished("one", 0.6).register()
    assert mlflow.get_tracking_uri() == "http://elsewhere"


def test_fault_63_registering_again_is_the_same_version_with_the_same_points(config, finished):
    import mlflow

    run = finished("one", 0.6)
    assert run.register() == run.register()
    assert len(versions(config)) == 1
    history = mlflow.MlflowClient(tracking_uri=config.tracking.uri).get_metric_history
    assert len(history(run.mlflow_run_id, "evaluation/accuracy")) == 1


@pytest.mark.parametrize(
    ("module", "function"),
    [(model_client, "create_logged_model"), (model_client, "create_version"), (client, "log_points")],
)
def test_a_lost_response_does_not_make_a_second_version(config, finished, monkeypatch, module, function):
    import mlflow

    original = getattr(module, function)

    def lost(*arguments, **options):
        original(*arguments, **options)
        raise TrackingError("the connection was closed")

    run = finished("one", 0.6)
    monkeypatch.setattr(module, function, lost)
    if function == "log_points":
        with pytest.raises(TrackingError, match="connection"):
            run.register()
    else:
        assert run.register().version == 1
    monkeypatch.setattr(module, function, original)
    assert run.register().version == 1
    models = mlflow.MlflowClient(tracking_uri=config.tracking.uri).search_logged_models(["1"])
    assert len(versions(config)) == len(models) == 1


def test_processes_that_register_the_same_export_at_once_agree_on_one_version(config, finished, monkeypatch):
    run = finished("one", 0.6)
    barrier = threading.Barrier(3)
    create = model_client.create_version

    def together(*arguments):
        barrier.wait(240)
        return create(*arguments)

    monkeypatch.setattr(model_client, "create_version", together)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(run.register().version)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert answers == [1, 1, 1]
    assert [version.version for version in versions(config)] == [1]


def test_a_newer_model_that_another_process_is_making_is_not_deleted(config, finished, monkeypatch):
    """Which is found as soon as it is complete; the older one was left behind by a lost answer."""
    import mlflow
    from mlflow.store.tracking import sqlalchemy_store

    run_id = finished("one", 0.6).mlflow_run_id
    times = itertools.count(1)
    monkeypatch.setattr(sqlalchemy_store, "get_current_time_millis", lambda: next(times))
    mlflow_client = mlflow.MlflowClient(tracking_uri=config.tracking.uri)
    _, complete, newest = (
        mlflow_client.create_logged_model("1", source_run_id=run_id, tags={"digest": "x"}).model_id for _ in range(3)
    )
    mlflow_client.finalize_logged_model(complete, "READY")
    assert model_client.find_logged_model(config.tracking.uri, "1", run_id, "digest", "x") == complete
    assert {model.model_id for model in mlflow_client.search_logged_models(["1"])} == {complete, newest}
    mlflow_client.finalize_logged_model(newest, "READY")
    assert model_client.find_logged_model(config.tracking.uri, "1", run_id, "digest", "x") == newest


def test_what_does_not_exist_is_not_registered(config, finished):
    run = finished("one", 0.6)
    storage.remove(run.completion.export_uri)
    with pytest.raises(TrackingError, match="no export here"):
        run.register()
    assert versions(config) == []


def test_an_export_that_was_exchanged_or_cut_is_not_registered(finished):
    run = finished("one", 0.6)
    weights = storage.join(run.completion.export_uri, "model.safetensors")
    content = storage.read_bytes(weights)
    storage.publish(weights, content[:-1])
    with pytest.raises(TrackingError, match="files of the export are missing or have another size"):
        run.register()
    storage.publish(weights, content)
    storage.publish_json(storage.join(run.completion.export_uri, "manifest.json"), {"files": {}})
    with pytest.raises(TrackingError, match="not the expected one"):
        run.register()


@pytest.mark.parametrize("left", [["model.safetensors"], ["manifest.json"]])
def test_fault_66_an_upload_that_was_interrupted_is_not_registered(config, finished, left):
    """Killed before its last file, the manifest; or some of its files have gone since."""
    run = finished("one", 0.6)
    for name in storage.list_names(run.completion.export_uri):
        if name not in left:
            storage.remove(storage.join(run.completion.export_uri, name))
    with pytest.raises(TrackingError):
        run.register()
    assert versions(config) == []


def test_an_evaluation_of_another_export_is_refused(finished):
    run = finished("one", 0.6)
    other = run.evaluation.model_copy(update={"export_digest": "f" * 64})
    with pytest.raises(EvaluationError, match="another export"):
        registry.register(run.config, run.paths, run.completion, other, run.mlflow_run_id)


class Threshold:
    """A task whose model is a number."""

    input_column = None

    def predict(self, model, inputs):
        return inputs[["x"]] > model


def test_the_champion_is_loaded_by_plain_mlflow_and_answers(config, finished, monkeypatch):
    import mlflow
    import pandas

    run = finished("one", 0.6)
    run.submit()
    asked = []

    def load_export(uri, digest):
        asked.append((uri, digest))
        return types.SimpleNamespace(model=1.5, task=Threshold(), config={})

    module = types.ModuleType("kftrain.checkpoint.export")
    module.load_export = load_export
    monkeypatch.setitem(sys.modules, "kftrain.checkpoint.export", module)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", config.tracking.uri)
    model = mlflow.pyfunc.load_model("models:/toy@champion")
    answer = model.predict(pandas.DataFrame({"x": [1.0, 2.0]}))
    assert answer["x"].tolist() == [False, True]
    assert asked == [(run.completion.export_uri, run.completion.export_digest)]


def test_nothing_that_is_stored_can_be_unpickled(config, finished, tmp_path):
    import pickle

    finished("one", 0.6).submit()
    stored = [path for path in (tmp_path / "mlruns").rglob("*") if path.is_file()]
    assert len(stored) == 2
    for path in stored:
        with (
            pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError)),
            path.open("rb") as file,
        ):
            pickle.load(file)


def test_the_manifest_is_the_one_that_the_checkpoint_package_writes():
    assert export.MANIFEST == "manifest.json"
    assert set(commit.FileEntry.model_fields) == {"bytes", "sha256"}


def test_an_export_that_lists_no_files_is_none(tmp_path):
    manifest = storage.dump_json(
        {
            **{"schema_version": 1, "checkpoint_digest": "c", "training_digest": "t", "dataset_digest": "d"},
            **{"step": 1, "files": {}},
        }
    )
    storage.publish(f"{tmp_path}/export/manifest.json", manifest)
    with pytest.raises(TrackingError, match=r"manifest\.json is damaged: files"):
        require_export(f"{tmp_path}/export", storage.sha256_text(manifest))
