import numpy as np
import pytest
from helpers.splits import open_split
from helpers.toy_data import toy_config

from kftrain.data import expanded as module
from kftrain.data.expanded import Expanded, expand_rows
from kftrain.data.schema import CLUSTER
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks.language_modeling import LanguageModeling

TEXTS = {f"d{number:02}/x.txt": b"%d " % number * (7 * number + 1) for number in range(12)}


class Together(LanguageModeling):
    def cluster(self, record):
        return str(int(record.key[1:3]) // 2)


@pytest.fixture(params=[LanguageModeling, Together])
def task(request):
    return request.param(sequence_length=10)


@pytest.fixture
def dataset(tmp_path, task):
    for name, text in TEXTS.items():
        (tmp_path / "s" / name).parent.mkdir(parents=True)
        (tmp_path / "s" / name).write_bytes(text)
    config = toy_config(str(tmp_path / "s"), tmp_path / "root", validation_fraction=0.6)
    return open_split(shard_dataset(config, task, lambda line: None).manifest_uri, "validation")


def test_rows_are_those_of_each_document_alone_whoever_counts_them(dataset, task, monkeypatch):
    monkeypatch.setattr(module, "KEPT_SAMPLES", 2)
    keys = dataset.group_keys()
    rows = [np.concatenate([row[None] for row in task.rows({"text": TEXTS[key]})["tokens"]]) for key in keys]
    joined, groups = np.concatenate(rows), np.repeat(np.arange(len(keys)), [len(each) for each in rows])
    counts = [[len(each) for each in rows[rank::3]] for rank in range(3)]
    for rank in range(3):
        said = []
        whole = expand_rows(dataset, task, lambda found, said=said: said.append(found) or counts, (rank, 3))
        assert said == [counts[rank]] and isinstance(whole, Expanded)
    assert whole.num_samples == len(joined) == expand_rows(dataset, task).num_samples > 40
    assert whole.group_keys() == keys and whole.num_groups == len(keys)
    for start, stop in [(0, len(joined)), (3, 4), (5, 33), (len(joined) - 1, len(joined))]:
        arrays, found = whole.read_range(start, stop)
        assert np.array_equal(arrays["tokens"], joined[start:stop]) and np.array_equal(found, groups[start:stop])
        assert (CLUSTER in arrays) == task.names_clusters
    if task.names_clusters:
        clusters = whole.read_range(0, len(joined))[0][CLUSTER]
        stored = dataset.read(np.arange(len(keys)))[CLUSTER]
        assert np.array_equal(clusters, stored[groups]) and 1 < len(set(clusters.tolist())) < len(keys)


def test_who_reads_few_rows_counts_those_of_few_documents(dataset, task):
    seen = []
    task.rows = lambda sample, rows=task.rows: seen.append(1) or rows(sample)
    found = expand_rows(dataset, task, max_rows=2)
    assert found.num_samples >= 2 and len(seen) == 3


def test_rows_that_are_stored_as_rows_are_read_as_they_are(dataset, task):
    task.rows = lambda sample: None
    assert expand_rows(dataset, task) is dataset
