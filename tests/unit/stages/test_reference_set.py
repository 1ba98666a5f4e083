"""The reference set: the same exports on a second dataset, which one it was, and what the stages say of it."""

from pathlib import Path

import pytest
from helpers.documents import evaluation_of, finished_run, sharded_run

from kftrain import launch, registry, tracking
from kftrain.config import parse
from kftrain.core import storage
from kftrain.errors import DataError
from kftrain.evaluate import reference_set
from kftrain.run import documents
from kftrain.run.documents import ReferenceSet
from kftrain.stages import register
from kftrain.stages.evaluate import evaluate


@pytest.fixture
def dataset(tmp_path):
    """A run that has another dataset below the same storage root, and its shards."""
    paths, _, shards = sharded_run(tmp_path, "data.validation_fraction=0.5", run_id="reference")
    return paths, shards


def evaluated(tmp_path, monkeypatch, reference):
    """Evaluates a finished run that names a reference set; returns outcome, targets and lines."""
    paths, config = finished_run(tmp_path)
    config = parse(config.to_yaml(), [f"evaluate.reference='{reference}'"])
    storage.publish(paths.config, config.to_yaml())
    completion, asked, lines = documents.read(documents.Completion, paths.complete), [], []

    def run_evaluation(paths, config, digest, own, others):
        asked.extend([own, *others()])
        found = evaluation_of(config, completion)
        for target in asked:
            update = {"evaluation_digest": target.evaluation_digest or digest}
            storage.publish_json(f"{target.output_uri}/metrics.json", found.model_copy(update=update).to_dict())
        return [found]

    monkeypatch.setattr(registry, "champion", lambda config: None)
    monkeypatch.setattr(launch, "run_evaluation", run_evaluation)
    monkeypatch.setattr(tracking, "log_evaluation", lambda *arguments, **more: None)
    return evaluate(paths.uri, lines.append), asked, lines, paths, completion


def test_the_same_exports_are_scored_on_the_reference_set_under_a_digest_of_its_own(tmp_path, monkeypatch, dataset):
    outcome, asked, lines, paths, completion = evaluated(tmp_path, monkeypatch, dataset[0].uri)
    own, there = asked
    assert (own.manifest_uri, own.evaluation_digest) == ("", "")
    assert there.manifest_uri == dataset[1].manifest_uri and there.export_digest == own.export_digest
    assert there.output_uri == paths.evaluation(completion.checkpoint_digest, there.evaluation_digest)
    assert there.output_uri != own.output_uri and there.required
    kept = documents.read(ReferenceSet, paths.reference_set)
    assert (kept.dataset_digest, kept.evaluation_digest) == (dataset[1].dataset_digest, there.evaluation_digest)
    assert outcome.metrics["reference_accuracy"] == 0.9 and outcome.metrics["accuracy"] == 0.9
    assert any("samples of the reference set: accuracy 0.9" in line for line in lines)
    assert "On the reference set" in outcome.html


@pytest.mark.parametrize("named", ["run", "folder", "manifest"])
def test_it_is_named_by_a_run_a_folder_or_a_manifest(tmp_path, monkeypatch, dataset, named):
    manifest = dataset[1].manifest_uri
    uris = {"run": dataset[0].uri, "folder": manifest.rsplit("/", 1)[0], "manifest": manifest}
    assert evaluated(tmp_path, monkeypatch, uris[named])[1][1].manifest_uri == manifest


def test_the_runs_own_data_are_no_reference_set(tmp_path, monkeypatch):
    paths, _, shards = sharded_run(tmp_path, run_id="other")
    outcome, asked, _, paths, _ = evaluated(tmp_path, monkeypatch, shards.manifest_uri)
    assert len(asked) == 1 and not storage.exists(paths.reference_set)
    assert "reference_accuracy" not in outcome.metrics


def test_without_one_what_was_left_before_is_forgotten(tmp_path, monkeypatch, dataset):
    *_, paths, completion = evaluated(tmp_path, monkeypatch, dataset[0].uri)
    assert reference_set.read_own_evaluation(paths, completion) is not None
    *_, paths, completion = evaluated(tmp_path, monkeypatch, "")
    assert reference_set.read_own_evaluation(paths, completion) is None


def test_one_that_is_not_there_is_an_error_before_a_job_is_started(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"manifest\.json"):
        evaluated(tmp_path, monkeypatch, f"{tmp_path}/nowhere")


def test_one_whose_shards_are_gone_is_an_error_before_a_job_is_started(tmp_path, monkeypatch, dataset):
    shards = [*Path(dataset[1].manifest_uri).parents[1].rglob("validation*.tar")]
    for shard in shards:
        shard.unlink()
    with pytest.raises(DataError, match=r"validation-\d+\.tar"):
        evaluated(tmp_path, monkeypatch, dataset[0].uri)


def gate_lacks(paths, monkeypatch, *overrides):
    """What the register step tells the gate."""
    given = []

    def gate_and_promote(*arguments):
        given.append(arguments[-1])
        raise DataError("enough")

    config = parse(storage.read_text(paths.config), overrides)
    storage.publish(paths.config, config.to_yaml())
    monkeypatch.setattr(registry, "register", lambda *arguments: None)
    monkeypatch.setattr(registry, "gate_and_promote", gate_and_promote)
    monkeypatch.setattr(register.mlflow_run, "read_mlflow_run_id", lambda paths: "mlflow-1")
    monkeypatch.setattr(register, "count_seen_records", lambda *arguments: None)
    with pytest.raises(DataError, match="enough"):
        register.register(paths.uri)
    return given[0]


def test_the_gate_asks_for_one_that_is_configured_and_was_not_measured(tmp_path, monkeypatch, dataset):
    *_, paths, _ = evaluated(tmp_path, monkeypatch, dataset[0].uri)
    assert not gate_lacks(paths, monkeypatch)
    storage.remove(paths.reference_set)
    assert gate_lacks(paths, monkeypatch)
    assert not gate_lacks(paths, monkeypatch, "evaluate.reference=''")
    assert gate_lacks(paths, monkeypatch, "registry.reference_margin=0.01")


def test_the_gate_asks_for_none_where_it_is_the_runs_own_data(tmp_path, monkeypatch):
    _, _, shards = sharded_run(tmp_path, run_id="other")
    *_, paths, _ = evaluated(tmp_path, monkeypatch, shards.manifest_uri)
    assert not gate_lacks(paths, monkeypatch)
