"""How often a process of a job reads the manifest of the dataset: a large one takes long, and all ranks read it."""

import pytest
from helpers import in_process, jobs

from kftrain.core import storage
from kftrain.data.shards import verify
from kftrain.evaluate.session import evaluate
from kftrain.tasks import run_dataset

READERS = ("read_bytes", "open_read", "read_range", "sha256_file")


@pytest.fixture
def read(monkeypatch):
    """The URIs that are read, one entry a read."""
    uris = []

    def counted(reader):
        def counting(uri, *arguments, **options):
            uris.append(uri)
            return reader(uri, *arguments, **options)

        return counting

    for name in READERS:
        monkeypatch.setattr(storage, name, counted(getattr(storage, name)))
    return uris


def test_a_process_of_a_job_lists_nothing(tmp_path, monkeypatch):
    """The stage that starts the job does: a thousand nodes would ask a store a thousand times."""
    paths, resolved = jobs.make_run(tmp_path, ["train.steps=2", "evaluate.interval_steps=1"])
    run_dataset.require_usable(*run_dataset.read_dataset(paths), resolved)

    def refuse(*given):
        raise AssertionError("a shard folder was listed")

    monkeypatch.setattr(verify, "_list_files", refuse)
    with pytest.raises(AssertionError):
        run_dataset.require_usable(*run_dataset.read_dataset(paths), resolved)
    in_process.train(paths, resolved, monkeypatch)
    jobs.request_evaluation(paths)
    with in_process.alone(monkeypatch):
        evaluate(paths, resolved)


def test_a_process_that_trains_or_evaluates_reads_the_manifest_once(tmp_path, monkeypatch, read):
    paths, resolved = jobs.make_run(tmp_path, ["train.steps=2", "evaluate.interval_steps=1"])
    manifest_uri = storage.read_json(paths.shards)["manifest_uri"]
    read.clear()
    in_process.train(paths, resolved, monkeypatch)
    assert read.count(manifest_uri) == 1, read
    jobs.request_evaluation(paths)
    read.clear()
    with in_process.alone(monkeypatch):
        evaluate(paths, resolved)
    assert read.count(manifest_uri) == 1, read
