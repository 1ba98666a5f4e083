"""A training on a mixture, through the stages' own code: sharded, trained in two attempts, evaluated by component."""

import numpy as np
from helpers import in_process, jobs

from kftrain import config
from kftrain.core import storage
from kftrain.data.training_split import open_training_split
from kftrain.evaluate.session import evaluate
from kftrain.run import documents
from kftrain.run.documents import Completion, Evaluation
from kftrain.run.paths import RunPaths
from kftrain.sharding import mixing
from kftrain.tasks import build_task
from kftrain.tasks.language_modeling import LanguageModeling
from kftrain.train.reading import read_training

WEIGHTS = ["data.mixture_phases=[{first_step: 4, weights: {prose: 1, numbers: 3}}]", "train.steps=8"]


def mixture_run(root):
    """A run on texts of two kinds that is ready to train."""
    jobs.write_texts(root / "prose")
    (root / "numbers").mkdir()
    for index in range(12):
        digits = np.random.default_rng(index).integers(0, 10, 1200)
        (root / "numbers" / f"{index}.txt").write_text("".join(map(str, digits)))
    parts = [{"name": name, "source": str(root / name)} for name in ("prose", "numbers")]
    text = jobs.TINY.replace("source: SOURCE", f"mixture: {parts}")
    resolved = config.parse(text, [f"run.storage_root={root}/store", *WEIGHTS])
    result = mixing.shard_mixture(resolved, build_task(resolved.task), [].append)
    paths = RunPaths.of(resolved.run.storage_root, "r")
    shards = documents.RunShards(manifest_uri=result.manifest_uri, dataset_digest=result.dataset_digest)
    storage.publish_json(paths.shards, shards.to_dict())
    storage.publish(paths.config, resolved.to_yaml())
    return paths, resolved


def test_a_mixture_is_trained_by_weight_and_evaluated_by_component(tmp_path, monkeypatch):
    paths, resolved = mixture_run(tmp_path)
    in_process.train(paths, resolved, monkeypatch)
    completion = documents.read(Completion, paths.complete)
    training = read_training(paths, resolved)
    assert completion.training_digest == training.digest
    assert training.identity["data.mixture"] == ["prose", "numbers"]
    assert training.identity["data.mixture_weights"] == [[0, 1.0, 1.0], [4, 1.0, 3.0]]

    samples, order = open_training_split(training.manifest_uri, training.manifest, resolved)
    tokens = samples.read(order.locate(np.arange(8 * 8)))["tokens"]
    is_digits = [set(bytes(row[row < 256].astype(np.uint8).tolist())) <= set(b"0123456789") for row in tokens]
    by_step = np.array(is_digits).reshape(8, 8).sum(axis=1)
    assert by_step.tolist() == [4, 4, 4, 4, 6, 6, 6, 6]

    monkeypatch.setattr(LanguageModeling, "slice_names", lambda self, keys, statistics: ["all"] * len(keys))
    jobs.request_evaluation(paths)
    with in_process.alone(monkeypatch):
        evaluate(paths, resolved)
    request = storage.read_json(paths.evaluation_request)
    found = documents.read(Evaluation, f"{request['targets'][0]['output_uri']}/metrics.json")
    assert set(found.slices) == {"prose", "numbers"}
    assert sum(each.num_samples for each in found.slices.values()) == found.num_samples
    assert found.baselines
