"""What the gate says where the champion was trained on validation records."""

import json
from types import SimpleNamespace

import pytest
from helpers.toy_data import shard_toy, toy_config

from kftrain import registry
from kftrain.config import Config
from kftrain.core import storage
from kftrain.data.dataset import ShardedDataset
from kftrain.run.config import keep_config
from kftrain.run.documents import RunShards
from kftrain.run.paths import RunPaths
from kftrain.stages.register import count_seen_records


def write_lines(path, numbers):
    path.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in numbers))
    return path


def dataset_of(source, root, **data):
    result = shard_toy(source, root, **data)
    return RunShards(manifest_uri=result.manifest_uri, dataset_digest=result.dataset_digest), result.manifest


def run_on(root, name, shards, began_with=""):
    """The export of a run that was trained on a dataset."""
    paths = RunPaths.of(str(root), name)
    config = toy_config("digits", root)
    weights = config.train.initial_weights.model_copy(update={"export_uri": began_with})
    keep_config(
        paths, config.model_copy(update={"train": config.train.model_copy(update={"initial_weights": weights})}), None
    )
    storage.publish_json(paths.shards, shards.to_dict())
    return paths.export("e" * 64)


@pytest.fixture
def champion(monkeypatch):
    def becomes(export_uri):
        monkeypatch.setattr(registry, "champion", lambda config: SimpleNamespace(version=3, export_uri=export_uri))

    return becomes


def numbers_in(result_manifest, uri, split):
    dataset = ShardedDataset(uri, result_manifest, split)
    arrays, groups = dataset.read_range(0, dataset.num_samples)
    return {arrays["data"][groups == group].tobytes().rstrip(b"\0") for group in range(dataset.num_groups)}


def test_validation_records_that_the_champion_was_trained_on_are_counted_without_reading_data(
    tmp_path, champion, monkeypatch
):
    source, root = write_lines(tmp_path / "a.jsonl", range(200)), tmp_path / "root"
    old = dataset_of(source, root)
    new = dataset_of(source, root, validation_fraction=0.5)
    seen = numbers_in(new[1], new[0].manifest_uri, "validation") & numbers_in(old[1], old[0].manifest_uri, "train")
    champion(run_on(root, "old", old[0]))
    for path in root.rglob("*.tar"):
        path.unlink()
    config = toy_config(source, root)
    found = count_seen_records(config, *new)
    total = new[1].splits["validation"].num_blocks
    assert 0 < len(seen) < total and found.figures == {"value": len(seen), "total": total}
    assert found.code == "trained_on" and found.verdict == "for"
    assert found.text == f"the champion, version 3, was trained on {len(seen)} of {total} validation records"
    assert count_seen_records(config, *old).figures["value"] == 0


def test_what_the_champion_began_with_counts_too(tmp_path, champion):
    root = tmp_path / "root"
    first = dataset_of(write_lines(tmp_path / "a.jsonl", range(200)), root, validation_fraction=0.1)
    later = dataset_of(write_lines(tmp_path / "b.jsonl", range(500, 700)), root)
    champion(run_on(root, "later", later[0], began_with=run_on(root, "first", first[0])))
    now = dataset_of(tmp_path / "a.jsonl", root, validation_fraction=0.5)
    assert count_seen_records(toy_config("digits", root), *now).figures["value"] > 50


@pytest.mark.parametrize("how", ["no run", "no dataset", "another root", "parts are gone"])
def test_what_is_not_known_is_said_so(tmp_path, champion, how):
    root = tmp_path / "root"
    known = dataset_of(write_lines(tmp_path / "a.jsonl", range(100)), root)
    other = dataset_of(write_lines(tmp_path / "b.jsonl", range(100, 200)), root)
    export_uri = run_on(root, "old", other[0])
    if how == "no run":
        export_uri = str(tmp_path / "model")
    elif how == "another root":
        export_uri = run_on(tmp_path / "elsewhere", "old", other[0])
    elif how == "no dataset":
        storage.remove(RunPaths.of(str(root), "old").shards)
    else:
        for shard in other[1].splits["train"].shards:
            storage.remove(str(root / "shards" / shard.folder.removeprefix("../")))
    champion(export_uri)
    found = count_seen_records(toy_config("digits", root), *known)
    assert (found.code, found.verdict, found.figures) == ("trained_on_unknown", "for", {})
    assert "is not known" in found.text and "\n" not in found.text


def test_there_is_nothing_to_say_without_a_champion(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "champion", lambda config: None)
    assert (
        count_seen_records(Config(), *dataset_of(write_lines(tmp_path / "a.jsonl", range(50)), tmp_path / "root"))
        is None
    )
