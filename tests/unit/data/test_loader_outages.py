"""A training that reads its data from an object store which fails, hangs and cuts answers off."""

import contextlib
import json

import numpy as np
import pytest
import s3fs
from helpers.fakes.bad_server import BadServer
from helpers.splits import open_split
from helpers.toy_data import flat_copy, shard_toy, text_folder

from kftrain.core import outages, remote, storage
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.tuning import Tuning
from kftrain.errors import RetryableError
from kftrain.worker import error_report, rank

SHORT = remote.Deadline(base_seconds=0.5, hurried_seconds=0.5, bytes_per_second=float(1 << 30))
TROUBLES = [503, "stall", "cut", 500, "silent", "page", "drip", "cut", 429, "whole", "short"]
MANIFEST_URI = "s3://bucket/shards/manifest.json"
NUM_STEPS = 20


@pytest.fixture(scope="module")
def manifest_uri(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    result = shard_toy(text_folder(folder / "texts", 400), folder / "root")
    return str(flat_copy(result.manifest_uri, folder / "flat") / "manifest.json")


@pytest.fixture
def server(manifest_uri, monkeypatch):
    """A store that holds the shards."""
    running = BadServer(GET="answer")
    folder = storage.local_path(manifest_uri).parent
    running.objects = {f"/bucket/shards/{path.name}": path.read_bytes() for path in folder.iterdir()}
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(outages, "_retry_policy", outages.OutagePolicy())
    monkeypatch.setattr(outages, "FIRST_DELAY_SECONDS", 0.01)
    storage.read_bytes(MANIFEST_URI)  # makes a client, which takes longer than a short deadline
    monkeypatch.setattr(remote, "deadline", SHORT)
    yield running
    running.close()
    s3fs.S3FileSystem.clear_instance_cache()


@contextlib.contextmanager
def steps_of(manifest_uri, prefetch):
    dataset = open_split(manifest_uri, "train")
    order = TrainingOrder(dataset.num_samples, 7, 16, 8)
    with contextlib.closing(
        TrainLoader(dataset, order, BatchPlan(8, 1), 0, Tuning(prefetch)).steps(0, NUM_STEPS)
    ) as steps:
        yield steps


@pytest.mark.parametrize("prefetch", [0, 2])
def test_fault_16_a_training_reads_on_through_a_store_that_fails(server, manifest_uri, prefetch):
    """Every third answer is a bad one; the batches are those of a disk, in the same order."""
    troubles, num_answers = iter(TROUBLES), iter(range(1_000_000))
    server.plan["GET"] = lambda: next(troubles, "answer") if next(num_answers) % 3 == 2 else "answer"
    with steps_of(MANIFEST_URI, prefetch) as steps, steps_of(manifest_uri, 0) as expected:
        for step, other in zip(steps, expected, strict=True):
            assert step.first_sample == other.first_sample
            for micro, same in zip(step.micro_batches, other.micro_batches, strict=True):
                assert micro.arrays.keys() == same.arrays.keys()
                assert all(np.array_equal(micro.arrays[name], same.arrays[name]) for name in same.arrays)
    assert next(troubles, None) is None, "all of them were met"


@pytest.mark.parametrize("what", ["stall", 503])
def test_fault_12_a_read_that_never_returns_names_shard_and_rank(server, monkeypatch, tmp_path, what):
    monkeypatch.setenv(error_report.ERROR_FILE_ENV, str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    with steps_of(MANIFEST_URI, 2) as steps:
        next(steps)
        outages.limit(0.2)
        server.plan["GET"] = what
        with pytest.raises(RetryableError) as caught:
            list(steps)
    assert rank.report_error(caught.value) == 138
    document = json.loads((tmp_path / "error.json").read_text())
    assert document["rank"] == 3 and "s3://bucket/shards/train-0000" in document["line"]
