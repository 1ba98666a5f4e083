"""Clusters: what the bootstrap resamples where a task names units that are larger than a block."""

import numpy as np
import pytest
import torch
from helpers import in_process
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import toy_config
from torch import nn

from kftrain.core import storage
from kftrain.data.schema import Block, Record, SourcePart
from kftrain.errors import DataError, UserCodeError
from kftrain.evaluate.score import Scores, score
from kftrain.evaluate.session import measure, of_units
from kftrain.parallel.mesh import Mesh
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.sharding.sources.resolve_source import choose_split
from kftrain.statistics import bootstrap

NUM_ITEMS, NUM_COPIES, NUM_TRIALS = 30, 10, 120


def patient(key):
    return key.split("/")[0]


class Visits(ToyTask):
    """The visits of a patient are alike."""

    def cluster(self, record):
        return patient(record.key)

    def statistics(self, output, batch):
        return {"sum": output.double(), "count": torch.ones_like(output).double()}

    def metrics(self, sums):
        return {"mean": np.asarray(sums["sum"]) / sums["count"]}


class Length(nn.Module):
    def forward(self, data, length):
        return length.float()


RECORDS = [Record(f"p{number % 7}/{number:02}", {"text": b"x" * (1 + number)}) for number in range(40)]


def shard(tmp_path, monkeypatch, task=None, records=RECORDS):
    monkeypatch.setattr("kftrain.sharding.sources.resolve_source.open_kind", lambda *arguments: Listed(records))
    return shard_dataset(toy_config("stdlib", tmp_path, validation_fraction=0.3), task or Visits(), lambda line: None)


class Listed:
    def __init__(self, records):
        self.list = records

    def listing(self):
        return [{"key": record.key} for record in self.list]

    def parts(self, part_size_bytes):
        return [SourcePart()]

    def read(self, part):
        return iter(self.list)


def test_the_cluster_of_each_validation_sample_lies_in_the_shards_and_none_is_in_both_splits(tmp_path, monkeypatch):
    result = shard(tmp_path, monkeypatch)
    clusters, keys = {}, {}
    for split in ("train", "validation"):
        dataset = open_split(result.manifest_uri, split)
        arrays, groups = dataset.read_range(0, dataset.num_samples)
        keys[split] = dataset.group_keys()
        clusters[split] = {
            (patient(keys[split][group]), int(n)) for group, n in zip(groups, arrays["cluster"], strict=True)
        }
    assert {patient(key) for key in keys["train"]}.isdisjoint(patient(key) for key in keys["validation"])
    assert len(keys["train"]) + len(keys["validation"]) == len(RECORDS)
    names, numbers = zip(*clusters["validation"], strict=True)
    assert len(set(names)) == len(set(numbers)) == len(clusters["validation"]) >= 2
    assert {number for _, number in clusters["train"]} == {0}
    held_out = {r.key for r in RECORDS if choose_split(Record(patient(r.key), {}), 0.3) == "validation"}
    assert set(keys["validation"]) == held_out


def test_a_task_without_clusters_has_shards_as_before(tmp_path, monkeypatch):
    plain = shard(tmp_path / "a", monkeypatch, ToyTask())
    assert [field.name for field in plain.manifest.sample_schema.fields] == ["data", "length"]
    assert plain.dataset_digest != shard(tmp_path / "b", monkeypatch).dataset_digest


def test_units_of_an_evaluation_are_the_clusters(tmp_path, monkeypatch):
    result = shard(tmp_path, monkeypatch)
    dataset = open_split(result.manifest_uri, "validation")
    with in_process.world(monkeypatch) as world:
        scores = score(Length(), Visits(), dataset, Mesh.of_copies(world), batch_size=3)
        plain_uri = shard(tmp_path / "plain", monkeypatch, Plain()).manifest_uri
        plain = score(Length(), Plain(), open_split(plain_uri, "validation"), Mesh.of_copies(world), 3)
    keys, units = dataset.group_keys(), scores.units(dataset.num_groups)
    pairs = set(zip(map(patient, keys), units.tolist(), strict=True))
    assert len(pairs) == len(set(units.tolist())) == len({patient(key) for key in keys})
    assert sorted(set(units.tolist())) == list(range(len(pairs)))
    assert plain.clusters is None and plain.units(9).tolist() == list(range(9))
    sums = {"rows": np.bincount(scores.groups).astype(float)}
    added, first_keys = of_units(sums, keys, units)
    for unit, key in enumerate(first_keys):
        mine = [number for number, other in enumerate(keys) if patient(other) == patient(key)]
        assert key == keys[mine[0]] and added["rows"][unit] == sums["rows"][mine].sum()


class Plain(Visits):
    cluster = ToyTask.cluster


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_cluster_without_a_name_is_refused(tmp_path, monkeypatch, name):
    class Nameless(Visits):
        def cluster(self, record):
            return name

    with pytest.raises(UserCodeError, match=r"task.cluster: must return a text"):
        shard(tmp_path, monkeypatch, Nameless())


def test_a_validation_block_must_be_named_as_its_record(tmp_path, monkeypatch):
    class Renames(Visits):
        def encode(self, records, split):
            for block in super().encode(records, split):
                yield Block(block.key + "!", block.arrays)

    with pytest.raises(DataError, match="no record of this name, so its cluster is not known"):
        shard(tmp_path, monkeypatch, Renames())


def mean(sums):
    return {"mean": np.asarray(sums["sum"]) / sums["count"]}


def equal_models(seed):
    """Two models that are equally good, measured on copies of the same items: sums per group, clusters of groups."""
    generator = np.random.default_rng(seed)
    items = np.repeat(np.arange(NUM_ITEMS), NUM_COPIES)
    keys = [f"{item}/{number}" for number, item in enumerate(items)]
    both = []
    for _ in range(2):
        quality = generator.normal(size=NUM_ITEMS)[items] + 0.01 * generator.normal(size=len(items))
        both.append({"sum": quality, "count": np.ones(len(items))})
    return both, keys, items


def promotions(as_clusters):
    """Share of trials in which one of two equal models is taken for better with 95 % confidence, one-sided."""
    count = 0
    for seed in range(NUM_TRIALS):
        both, keys, items = equal_models(seed)
        scores = Scores(both[0], np.arange(len(items)), items if as_clusters else None)
        units = scores.units(len(items))
        tables = []
        for sums in both:
            added, names = of_units(sums, keys, units)
            tables.append({**added, "keys": np.array(names)})
        gain = bootstrap.paired_improvement(mean, "mean", "maximize", *tables, 200, 0.9, 0)
        count += gain.low > 0
    return count / NUM_TRIALS


def test_copies_as_units_promote_equal_models_and_clusters_do_not():
    assert promotions(as_clusters=False) > 0.25
    assert promotions(as_clusters=True) < 0.09


class Sliced:
    def metrics(self, sums):
        return mean(sums)

    def slice_names(self, keys, statistics):
        return [key.split("/")[1] for key in keys]


def test_intervals_and_those_of_slices_are_of_resampled_clusters():
    """A plain loop: as many clusters as there are, each with all of its groups that are in the slice."""
    generator = np.random.default_rng(4)
    clusters = generator.integers(0, 12, 60)
    values = generator.normal(size=60) + clusters
    keys = [f"{number}/{'ab'[number % 3 == 0]}" for number in range(60)]
    sums = {"sum": values, "count": np.ones(60)}
    metrics, slices = measure(Sliced(), sums, np.ones(60), keys, 1500, clusters)
    names = sorted(set(clusters.tolist()))
    for name, found in [("", metrics["mean"]), *((n, part.intervals["mean"]) for n, part in slices.items())]:
        mine = {
            cluster: [v for v, c, k in zip(values, clusters, keys, strict=True) if c == cluster and k.endswith(name)]
            for cluster in names
        }
        drawn = ([v for c in generator.choice(names, len(names)) for v in mine[c]] for _ in range(1500))
        low, high = np.quantile([np.mean(each) for each in drawn], [0.025, 0.975])
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.15 * (high - low))
        assert found.value == pytest.approx(np.mean([v for each in mine.values() for v in each]))
    naive = bootstrap.intervals(mean, sums, 1500, 0.95, 0)["mean"]
    assert metrics["mean"].high - metrics["mean"].low > 1.5 * (naive.high - naive.low)


def test_clusters_of_one_group_each_change_nothing():
    generator = np.random.default_rng(0)
    sums = {"sum": generator.normal(size=50), "count": np.ones(50)}
    keys = [f"{number}/{'ab'[number % 2]}" for number in range(50)]
    assert measure(Sliced(), sums, np.ones(50), keys, 200) == measure(
        Sliced(), sums, np.ones(50), keys, 200, generator.permutation(50)
    )
    assert storage.dump_json(of_units(sums, keys, np.arange(50))[1]) == storage.dump_json(keys)
