"""A training on shards that stock `webdataset` wrote, through the stages' own code, where they lie."""

import io

import numpy as np
import pytest
import webdataset
from helpers import in_process, jobs
from PIL import Image

from kftrain import config
from kftrain.core import storage
from kftrain.errors import DataError
from kftrain.evaluate.session import evaluate
from kftrain.run import documents
from kftrain.run.documents import Completion, Evaluation
from kftrain.run.paths import RunPaths
from kftrain.sharding import mixing
from kftrain.tasks import build_task
from kftrain.tasks.run_dataset import read_dataset, require_usable
from kftrain.train.reading import read_training

TEXT = """
data: {source: SOURCE, shards: adopt, validation_fraction: 0.3}
task: {kind: image_classification, image_size: 8, num_channels: 3, num_classes: 2, storage: files, resize: crop,
       augment: {flip: true}}
model: {kind: vision_transformer, dim: 8, num_layers: 1, num_heads: 1, patch_size: 4}
train: {steps: 4, global_batch_size: 8}
checkpoint: {interval_steps: 4}
evaluate: {interval_steps: 0, batch_size: 8}
"""


@pytest.fixture
def run(tmp_path):
    draw = np.random.default_rng(0)
    (tmp_path / "theirs").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "theirs/s-%06d.tar"), maxcount=20, verbose=0) as writer:
        for number in range(60):
            size = draw.integers(9, 20, 2)
            pixels = draw.integers(0, 100, (*size, 3), dtype=np.uint8) + np.uint8(100 * (number % 2))
            stream = io.BytesIO()
            Image.fromarray(pixels).save(stream, "JPEG")
            writer.write({"__key__": f"{number}", "jpg": stream.getvalue(), "cls": number % 2})
    text = TEXT.replace("SOURCE", str(tmp_path / "theirs"))
    resolved = config.parse(text, [f"run.storage_root={tmp_path / 'store'}"])
    result = mixing.shard_mixture(resolved, build_task(resolved.task), [].append)
    paths = RunPaths.of(resolved.run.storage_root, "r")
    shards = documents.RunShards(manifest_uri=result.manifest_uri, dataset_digest=result.dataset_digest)
    storage.publish_json(paths.shards, shards.to_dict())
    storage.publish(paths.config, resolved.to_yaml())
    return paths, resolved


def test_adopted_shards_are_trained_on_and_evaluated_where_they_are(run, tmp_path, monkeypatch):
    paths, resolved = run
    require_usable(*read_dataset(paths), resolved)
    in_process.train(paths, resolved, monkeypatch)
    assert documents.read(Completion, paths.complete).samples_consumed == 32
    jobs.request_evaluation(paths)
    with in_process.alone(monkeypatch):
        evaluate(paths, resolved)
    request = storage.read_json(paths.evaluation_request)
    found = documents.read(Evaluation, f"{request['targets'][0]['output_uri']}/metrics.json")
    _, manifest = read_dataset(paths)
    assert found.num_samples == found.num_groups == manifest.splits["validation"].num_samples
    assert found.baselines == manifest.baselines and found.baselines["accuracy"]
    assert not list((tmp_path / "store").rglob("*.tar"))


def test_a_job_whose_adopted_shard_is_gone_is_refused_before_it_starts(run, tmp_path):
    paths, resolved = run
    (tmp_path / "theirs/s-000001.tar").unlink()
    with pytest.raises(DataError, match=r"theirs/s-000001\.tar: missing; adopt the shards again"):
        require_usable(*read_dataset(paths), resolved)


def test_neither_a_job_nor_its_processes_read_adopted_shards_of_another_place(run, tmp_path):
    paths, resolved = run
    data = resolved.data.model_copy(update={"source": str(tmp_path / "others")})
    elsewhere = resolved.model_copy(update={"data": data})
    for read in (lambda: require_usable(*read_dataset(paths), elsewhere), lambda: read_training(paths, elsewhere)):
        with pytest.raises(DataError, match=r"lie neither below data\.source nor below the storage root"):
            read()
