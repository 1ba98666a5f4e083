"""Evaluation jobs: the same bytes on any number of processes, and the same numbers as a plain loop."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import jobs
from helpers.splits import open_split

from kftrain import config
from kftrain.checkpoint.export import load_export
from kftrain.core import storage
from kftrain.errors import EvaluationError
from kftrain.evaluate.identity import evaluation_digest
from kftrain.launch import run_evaluation
from kftrain.run import documents
from kftrain.run.documents import Completion, Evaluation, EvaluationRequest, EvaluationTarget

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    paths, resolved = jobs.make_run(tmp_path_factory.mktemp("trained"))
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    return paths, resolved, documents.read(Completion, paths.complete)


def target_of(completion, output_uri):
    return EvaluationTarget(
        export_uri=completion.export_uri,
        export_digest=completion.export_digest,
        checkpoint_digest=completion.checkpoint_digest,
        output_uri=output_uri,
    )


def evaluate(trained, output_uri, processes, overrides=()):
    paths, resolved, completion = trained
    resolved = config.parse(resolved.to_yaml(), overrides)
    storage.publish(paths.config, resolved.to_yaml())
    digest = evaluation_digest(resolved, completion.dataset_digest)
    request = EvaluationRequest(evaluation_digest=digest, targets=[target_of(completion, output_uri)])
    storage.publish_json(paths.evaluation_request, request.to_dict())
    done = jobs.run_worker(paths, resolved, "evaluate", processes, KFTRAIN_TRUSTED_ROOTS=output_uri)
    assert done.returncode == 0, done.stdout + done.stderr
    return storage.read_bytes(storage.join(output_uri, "metrics.json")), storage.read_bytes(
        storage.join(output_uri, "statistics.npz")
    )


def test_metrics_are_identical_for_one_two_and_three_processes(trained, tmp_path):
    results = {processes: evaluate(trained, str(tmp_path / str(processes)), processes) for processes in (1, 2, 3)}
    assert results[1] == results[2] == results[3]


@pytest.mark.parametrize("kind", ["trained", "classifier"])
def test_a_sharded_model_gives_the_bytes_of_whole_copies(kind, tmp_path, request):
    job = request.getfixturevalue(kind)
    results = set()
    for processes, layout in ((1, "copies"), (2, "training"), (3, "training")):
        folder = tmp_path / f"{layout}-{processes}"
        results.add(evaluate(job, str(folder), processes, [f"evaluate.layout={layout}"]))
        found = storage.read_json(str(folder / "performance.json"))
        assert found["num_passes"] > 0 and found["latency_seconds"]["median"] > 0
    assert len(results) == 1


def test_a_model_whose_matrices_are_split_gives_the_same_metrics(trained, tmp_path):
    """Along the axis `tensor` sums are taken in another order."""
    evaluate(trained, str(tmp_path / "copies"), 1)
    evaluate(trained, str(tmp_path / "tensor"), 2, ["evaluate.layout=training", "parallel.tensor=2"])
    ours, theirs = (documents.read(Evaluation, str(tmp_path / name / "metrics.json")) for name in ("tensor", "copies"))
    assert ours.num_samples == theirs.num_samples and ours.metrics.keys() == theirs.metrics.keys()
    for name, found in ours.metrics.items():
        assert found.value == pytest.approx(theirs.metrics[name].value, rel=1e-5)


def test_fault_41_an_evaluation_whose_process_was_killed_gives_the_same_metrics_when_it_runs_again(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(jobs.TESTS))
    overrides = ["task.kind=helpers.models.scripted_task:ScriptedTask", "train.steps=5", "optimizer.warmup_steps=1"]
    paths, resolved = jobs.make_run(tmp_path, overrides)
    assert jobs.run_worker(paths, resolved).returncode == 0
    job = paths, resolved, documents.read(Completion, paths.complete)
    undisturbed = evaluate(job, storage.join(paths.uri, "undisturbed"), 2)
    target = target_of(job[2], storage.join(paths.uri, "killed"))
    digest = evaluation_digest(resolved, job[2].dataset_digest)
    storage.publish_json(
        paths.evaluation_request, EvaluationRequest(evaluation_digest=digest, targets=[target]).to_dict()
    )
    process = jobs.start_worker(paths, resolved, task="evaluate", SCRIPT=json.dumps({"statistics_seconds": 600}))
    jobs.wait_for_line(process, "slow statistics")
    jobs.ranks_of(process)[0].kill()
    output = process.communicate(timeout=600)[0]
    assert process.returncode >= 128, output
    assert storage.list_names(target.output_uri) == []
    assert evaluate(job, target.output_uri, 1) == undisturbed


def test_metrics_equal_those_of_a_plain_loop_over_the_validation_samples(trained, tmp_path):
    paths, _, completion = trained
    evaluate(trained, str(tmp_path / "out"), 2)
    evaluation = documents.read(Evaluation, str(tmp_path / "out" / "metrics.json"))
    loaded = load_export(completion.export_uri, completion.export_digest)
    dataset = open_split(storage.read_json(paths.shards)["manifest_uri"], "validation")
    documents_, _ = dataset.read_range(0, dataset.num_samples)
    tokens = np.concatenate([loaded.task.rows({"text": text})["tokens"] for text in documents_["text"]])
    batch = loaded.task.batch({"tokens": tokens})
    statistics = loaded.task.statistics(loaded.model(*loaded.task.inputs(batch)), batch)
    sums = {name: np.asarray(value.double().sum().item()) for name, value in statistics.items()}
    for name, value in loaded.task.metrics(sums).items():
        assert evaluation.metrics[name].value == pytest.approx(float(value), rel=1e-6)
        assert evaluation.metrics[name].low <= evaluation.metrics[name].value <= evaluation.metrics[name].high
    assert evaluation.num_samples == len(tokens) and evaluation.num_groups == dataset.num_samples


def test_the_launcher_returns_what_was_asked_for_and_does_not_score_twice(trained, tmp_path, monkeypatch):
    paths, resolved, completion = trained
    digest = evaluation_digest(resolved, completion.dataset_digest)
    target = target_of(completion, paths.evaluation(completion.checkpoint_digest, digest))
    (evaluation,) = run_evaluation(paths, resolved, digest, target)
    assert evaluation.export_digest == completion.export_digest
    monkeypatch.setattr("kftrain.launch.jobs.build_launcher", lambda config: pytest.fail("a second job was started"))
    assert run_evaluation(paths, resolved, digest, target) == [evaluation]
    with pytest.raises(EvaluationError, match="of another evaluation"):
        run_evaluation(paths, resolved, "0" * 64, target)


def test_a_damaged_export_is_not_scored(trained):
    paths, resolved, completion = trained
    output_uri = storage.join(paths.uri, "of-a-damaged-export")
    weights = storage.local_path(storage.join(completion.export_uri, "model.safetensors"))
    whole = weights.read_bytes()
    content = bytearray(whole)
    content[-1] ^= 1
    weights.write_bytes(content)
    try:
        request = EvaluationRequest(evaluation_digest="d", targets=[target_of(completion, output_uri)])
        storage.publish_json(paths.evaluation_request, request.to_dict())
        done = jobs.run_worker(paths, resolved, "evaluate", 2)
    finally:
        weights.write_bytes(whole)
    assert done.returncode == 12
    assert "model.safetensors: a file is damaged" in storage.read_json(paths.error)["line"]
    assert not storage.exists(output_uri)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    text = (Path(__file__).parents[2] / "examples" / "digits.yaml").read_text()
    overrides = ["train.steps=20", "optimizer.warmup_steps=1", "model.num_layers=1"]
    paths, resolved = jobs.prepare(tmp_path_factory.mktemp("classifier"), text, overrides)
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    return paths, resolved, documents.read(Completion, paths.complete)


def test_calibration_curves_and_classes_are_identical_for_one_two_and_three_processes(classifier, tmp_path):
    results = {n: evaluate(classifier, str(tmp_path / str(n)), n) for n in (1, 2, 3)}
    assert results[1] == results[2] == results[3]
    found = documents.read(Evaluation, str(tmp_path / "3" / "metrics.json"))
    assert sum(each.num_samples for each in found.calibration.bins) == found.num_samples
    assert sum(each.num_samples for each in found.classes) == found.num_samples
    assert {"calibration_error", "roc_auc", "macro_f1"} <= found.figures.keys() and found.curves
    slices = [storage.read_bytes(str(tmp_path / n / "slices.npz")) for n in "123"]
    assert slices[0] == slices[1] == slices[2]
    assert storage.exists(str(tmp_path / "1" / "performance.json"))
