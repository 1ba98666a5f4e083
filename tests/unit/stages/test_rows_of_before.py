"""Datasets of language models from before version 0.3: rows of bytes, in blocks, under an index without lengths."""

import hashlib

import numpy as np
import pytest
from helpers import in_process
from helpers.toy_data import toy_config

from kftrain.config import Config
from kftrain.core import storage
from kftrain.data.dataset import ShardedDataset
from kftrain.data.expanded import expanded
from kftrain.data.schema import Block, Field, SampleSchema
from kftrain.data.shards.manifest import Manifest, Split, content_digest, index_name, read_manifest
from kftrain.data.shards.writer import SplitWriter
from kftrain.errors import DataError
from kftrain.evaluate.score import score
from kftrain.models.transformer import Transformer
from kftrain.parallel.mesh import Mesh
from kftrain.run.documents import RunShards
from kftrain.run.paths import RunPaths
from kftrain.stages.dataset import num_training_samples, require_usable
from kftrain.tasks import build_task
from kftrain.tasks.settings import TaskConfig
from kftrain.train.reading import Training, training_samples, validation_rows

LENGTH = 8
SCHEMA = SampleSchema((Field("tokens", "uint16", (LENGTH + 1,)),))
ROWS = {
    "train": np.random.default_rng(0).integers(0, 256, (20, LENGTH + 1)).astype(np.uint16),
    "validation": np.array([[256, *range(8)], [7, 1, 2, *[257] * 6], [256, 9, *[257] * 7]], np.uint16),
}
BLOCKS = {
    "train": {"block-000000": slice(0, 12), "block-000001": slice(12, 20)},
    "validation": {"a": slice(0, 2), "b": slice(2, 3)},
}


@pytest.fixture
def shards(tmp_path):
    folder, splits = tmp_path / "shards" / "d", {}
    folder.mkdir(parents=True)
    for split, rows in ROWS.items():
        with SplitWriter(folder, split, SCHEMA, 1 << 16) as writer:
            for key, part in BLOCKS[split].items():
                writer.write(Block(key, {"tokens": rows[part]}))
            (shard,) = writer.finish()
        path = folder / index_name(shard.name)
        np.save(path, np.load(path)[:, :2])
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        splits[split] = [shard.model_copy(update={"index_sha256": sha256})]
    settings = {"task": "language_modeling", "sequence_length": LENGTH, "rows_per_block": 256}
    document = Manifest(
        format_version=1,
        dataset_digest=content_digest(SCHEMA, settings, splits, 1),
        sample_schema=SCHEMA,
        task_kind="language_modeling",
        task_settings=settings,
        splits={name: Split(shards=shards) for name, shards in splits.items()},
        source="s",
        source_listing_digest="0",
        baselines={},
    ).to_dict()
    for later in ("validation_schema", "components", "statistics", "findings", "parent"):
        document.pop(later, None)
    uri = str(folder / "manifest.json")
    storage.publish_json(uri, document)
    return RunShards(manifest_uri=uri, dataset_digest=document["dataset_digest"])


def config_of(length=LENGTH, **task):
    return Config(task=TaskConfig(kind="language_modeling", sequence_length=length, **task))


def test_they_are_read_and_scored_as_they_are(shards, tmp_path, monkeypatch):
    manifest, config = read_manifest(shards.manifest_uri), config_of()
    task = build_task(config.task)
    require_usable(shards, manifest, config)
    assert num_training_samples(manifest, task) == 20
    training = Training(RunPaths(str(tmp_path)), config, shards.manifest_uri, manifest, {}, task)
    order = np.random.default_rng(1).permutation(20)
    assert np.array_equal(training_samples(training).read(order)["tokens"], ROWS["train"][order])
    rows = validation_rows(training, lambda found: [found], (0, 1))
    found, groups = rows.read_range(0, 3)
    assert np.array_equal(found["tokens"], ROWS["validation"]) and groups.tolist() == [0, 0, 1]
    dataset = ShardedDataset.open(shards.manifest_uri, "validation")
    with in_process.world(monkeypatch) as world:
        model = Transformer(**task.model_arguments(), dim=16, num_layers=1, num_heads=2)
        scores = score(model, task, expanded(dataset, task), Mesh.of_copies(world), batch_size=2)
    assert scores.statistics["bytes"].tolist() == [8, 2, 1]


@pytest.mark.parametrize("config", [config_of(16), config_of(tokenizer={"train": {"vocab_size": 300}})])
def test_a_task_that_they_were_not_made_for_asks_for_new_ones(shards, config):
    with pytest.raises(DataError):
        require_usable(shards, read_manifest(shards.manifest_uri), config)


def test_todays_shards_fit_any_length(tmp_path):
    from kftrain.sharding.shard_dataset import shard_dataset

    folder = tmp_path / "s"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text("some text " * number)
    results = [
        shard_dataset(toy_config(folder, tmp_path / "root", validation_fraction=0.3), build_task(config.task), print)
        for config in (config_of(8), config_of(16))
    ]
    assert [result.reused for result in results] == [False, True]
    assert results[0].dataset_digest == results[1].dataset_digest
    shards = RunShards(manifest_uri=results[0].manifest_uri, dataset_digest=results[0].dataset_digest)
    for length in (8, 16):
        require_usable(shards, results[0].manifest, config_of(length))
