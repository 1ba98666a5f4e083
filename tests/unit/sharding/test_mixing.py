"""A mixture of datasets: sharded one by one, read as one, trained by weight."""

from collections import Counter

import pytest
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder, toy_config

from kftrain import reports
from kftrain.data.dataset import ShardedDataset
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.data.schema import SPLITS
from kftrain.data.shards import verify
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.training_split import open_training_split
from kftrain.data.tuning import Tuning
from kftrain.errors import DataError
from kftrain.sharding import mixing

OTHER = str.maketrans("0123456789 ", "abcdefghij_")
"""Makes texts that have no character in common with those before."""


def rows_of(dataset: ShardedDataset) -> list[bytes]:
    arrays, _ = dataset.read_range(0, dataset.num_samples)
    return [bytes(data) + length.tobytes() for data, length in zip(arrays["data"], arrays["length"], strict=True)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A configuration, its shards, and the rows of each component's splits when it is sharded alone."""
    folder = tmp_path_factory.mktemp("mixture")
    sources = {"small": text_folder(folder / "small", 40), "large": text_folder(folder / "large", 150)}
    for path in (folder / "large").rglob("*.txt"):
        path.write_text(path.read_text().upper().translate(OTHER))
    parts = [{"name": name, "source": str(source), "weight": 1} for name, source in sources.items()]
    config = toy_config("stdlib", folder / "root", mixture=parts)
    lines: list[str] = []
    result = mixing.shard_mixture(config, ToyTask(), lines.append)
    assert any(line.startswith("small: ") for line in lines) and any(line.startswith("large: ") for line in lines)
    alone = {}
    for name, source in sources.items():
        uri = shard_toy(source, folder / "alone").manifest_uri
        alone[name] = {split: rows_of(open_split(uri, split)) for split in SPLITS}
    return config, result, alone


def test_the_splits_of_a_mixture_are_those_of_its_components_one_after_another(mixture):
    _, result, alone = mixture
    for split in SPLITS:
        dataset = open_split(result.manifest_uri, split)
        assert rows_of(dataset) == alone["small"][split] + alone["large"][split]
    keys = open_split(result.manifest_uri, "validation").group_keys()
    assert {key.partition("/")[0] for key in keys} == {"small", "large"} and len(set(keys)) == len(keys)


def test_what_verifies_a_dataset_verifies_a_mixture(mixture):
    _, result, _ = mixture
    manifest = read_manifest(result.manifest_uri)
    assert manifest.dataset_digest == result.dataset_digest == result.manifest_uri.split("/")[-2]
    verify.verify_shards(result.manifest_uri, manifest)
    verify.verify_keys(result.manifest_uri, manifest)
    verify.check_listing(result.manifest_uri, manifest)


def test_reports_name_the_components_and_what_each_holds(mixture):
    config, result, alone = mixture
    text = reports.render_markdown(reports.describe_shards(read_manifest(result.manifest_uri).to_dict()))
    for component in config.data.mixture:
        counts = [len(alone[component.name][split]) for split in ("train", "validation")]
        rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith(f"| {component.name} |")]
        assert [[cell.strip() for cell in row[2:]] for row in rows] == [[f"{count:,}" for count in counts]]


def test_training_sees_each_component_once_in_its_own_epoch(mixture):
    config, result, alone = mixture
    samples, order = open_training_split(result.manifest_uri, read_manifest(result.manifest_uri), config)
    num_small, num_large = len(alone["small"]["train"]), len(alone["large"]["train"])
    assert num_large > 2 * num_small
    loader = TrainLoader(samples, order, BatchPlan(10, 1), 0, Tuning(0))
    seen = []
    for step in loader.steps(0, 2 * num_large // 10 + 1):
        arrays = step.micro_batches[0].arrays
        seen += [bytes(data) + length.tobytes() for data, length in zip(arrays["data"], arrays["length"], strict=True)]
    small, large = Counter(alone["small"]["train"]), Counter(alone["large"]["train"])
    assert not small.keys() & large.keys()
    of_small, of_large = ([row for row in seen if row in own] for own in (small, large))
    assert Counter(of_large[:num_large]) == large
    assert Counter(of_small[:num_small]) == small == Counter(of_small[num_small : 2 * num_small])
    assert abs(len(of_small) - len(of_large)) <= 2


def test_each_component_keeps_the_shards_of_its_own_window_open(mixture, monkeypatch):
    config, result, alone = mixture
    expected = []
    monkeypatch.setattr(
        ShardedDataset, "expect_window", lambda self, *sizes: expected.append((self.num_samples, sizes))
    )
    open_training_split(result.manifest_uri, read_manifest(result.manifest_uri), config)
    counts = [len(alone[name]["train"]) for name in ("small", "large")]
    assert expected == [(count, (-(-count // 1024), min(1024, count))) for count in counts]


def test_a_mixture_is_found_again_and_its_digest_names_its_content(mixture):
    config, result, _ = mixture
    again = mixing.shard_mixture(config, ToyTask(), [].append)
    assert again.reused and again.dataset_digest == result.dataset_digest
    reversed_ = config.data.model_copy(update={"mixture": config.data.mixture[::-1]})
    other = mixing.shard_mixture(config.model_copy(update={"data": reversed_}), ToyTask(), [].append)
    assert other.dataset_digest != result.dataset_digest
    heavier = [each.model_copy(update={"weight": 5.0}) for each in config.data.mixture]
    weighted = config.model_copy(update={"data": config.data.model_copy(update={"mixture": tuple(heavier)})})
    assert mixing.shard_mixture(weighted, ToyTask(), [].append).dataset_digest == result.dataset_digest


def test_shards_of_another_mixture_are_refused(mixture):
    config, result, _ = mixture
    names = [each.model_copy(update={"name": f"my-{each.name}"}) for each in config.data.mixture]
    other = config.model_copy(update={"data": config.data.model_copy(update={"mixture": tuple(names)})})
    with pytest.raises(DataError, match="not of this mixture"):
        open_training_split(result.manifest_uri, read_manifest(result.manifest_uri), other)


def test_components_of_different_fields_are_refused(mixture):
    _, result, _ = mixture
    manifest = read_manifest(result.manifest_uri)
    narrow = manifest.sample_schema.__class__(manifest.sample_schema.fields[:1])
    with pytest.raises(DataError, match="a and b of a mixture do not hold the same fields"):
        mixing.mix_manifests({"a": manifest, "b": manifest.model_copy(update={"sample_schema": narrow})})
