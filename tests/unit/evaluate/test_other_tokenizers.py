"""Models of different tokenizers are compared document by document, in bits per byte of the same text."""

import numpy as np
import pandas
import pytest
import torch
from helpers import in_process
from helpers.splits import open_split
from helpers.toy_data import toy_config

from kftrain.config import Config
from kftrain.data.expanded import expand_rows
from kftrain.evaluate.score import group_sums, score
from kftrain.models.transformer import Transformer
from kftrain.parallel.mesh import Mesh
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.stages import evaluate
from kftrain.statistics import bootstrap
from kftrain.tasks.language_modeling import LanguageModeling
from kftrain.tasks.settings import TaskConfig

WORDS = ["loss", "shard", "naïve", "return None\n", "the", "a"]


def text(number):
    return " ".join(np.random.default_rng(number).choice(WORDS, 30 + 3 * number)).encode()


@pytest.fixture
def dataset(tmp_path):
    """The challenger's: its training split is tokens of its own, its validation split is text."""
    folder = tmp_path / "s"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_bytes(text(number))
    task = LanguageModeling(sequence_length=24, tokenizer={"train": {"vocab_size": 300}})
    config = toy_config(str(folder), tmp_path / "root", validation_fraction=0.4)
    manifest_uri = shard_dataset(config, task, lambda line: None).manifest_uri
    return open_split(manifest_uri, "validation"), task


def model_of(task, seed):
    torch.manual_seed(seed)
    return Transformer(**task.model_arguments(), dim=16, num_layers=1, num_heads=2).eval()


def test_champion_of_bytes_and_challenger_of_a_trained_bpe(dataset, monkeypatch):
    validation, bpe = dataset
    tasks = {"challenger": bpe, "champion": LanguageModeling(sequence_length=40)}
    models = {name: model_of(task, seed) for seed, (name, task) in enumerate(tasks.items())}
    keys, measured = validation.group_keys(), {}
    with in_process.world(monkeypatch) as world:
        for name, task in tasks.items():
            scores = score(models[name], task, expand_rows(validation, task), Mesh.of_copies(world), batch_size=3)
            measured[name] = {**group_sums(scores.statistics, scores.groups, len(keys)), "keys": np.array(keys)}
    texts = [text(int(key[:2])).decode() for key in keys]
    for name, task in tasks.items():
        assert measured[name]["bytes"].tolist() == [len(each.encode()) for each in texts]
        alone = task.predict(models[name], pandas.DataFrame({"text": texts}))["bits_per_byte"]
        np.testing.assert_allclose(measured[name]["bits"] / measured[name]["bytes"], alone, rtol=1e-5)
    found = bootstrap.paired_improvement(
        bpe.metrics, "bits_per_byte", "minimize", measured["challenger"], measured["champion"], 100, 0.95, 0
    )
    of = {name: sums["bits"].sum() / sums["bytes"].sum() for name, sums in measured.items()}
    assert found.value == pytest.approx(of["champion"] - of["challenger"]) and found.low <= found.value <= found.high


def test_only_what_changes_the_meaning_of_the_metrics_makes_it_another_task(monkeypatch):
    def obstacle(theirs, ours):
        monkeypatch.setattr(evaluate, "read_recipe", lambda *_: Recipe)
        Recipe.task = TaskConfig.model_validate({"kind": "language_modeling", **theirs})
        config = Config.model_validate({"task": {"kind": "language_modeling", **ours}})
        return evaluate._find_obstacle(config, Champion, "0" * 64)

    class Recipe:
        task = None

    class Champion:
        run_uri = "./runs/x"
        export_uri = run_uri
        export_digest = "0" * 64
        checkpoint_digest = export_digest

    trained = {"tokenizer": {"train": {"vocab_size": 300}}, "sequence_length": 24}
    assert obstacle({"tokenizer": "bytes"}, trained) == obstacle(trained, {"attention": "documents"}) == ""
    assert "another task" in obstacle({"kind": "image_classification", "image_size": 8, "num_classes": 2}, trained)
