"""What a rank asks of storage before and between its steps: each document once, whatever number of ranks there are."""

import collections

from helpers import in_process, jobs

from kftrain.core import storage
from kftrain.run import documents
from kftrain.run.documents import Completion


def test_a_rank_reads_the_manifest_once(tmp_path, monkeypatch):
    paths, resolved = jobs.make_run(tmp_path, ["train.steps=2", "checkpoint.interval_steps=1"])
    manifest_uri = storage.read_json(paths.shards)["manifest_uri"]
    reads = collections.Counter()
    read = storage.read_bytes

    def counted(uri, *arguments, **options):
        reads[uri] += 1
        return read(uri, *arguments, **options)

    monkeypatch.setattr(storage, "read_bytes", counted)
    in_process.train(paths, resolved, monkeypatch)
    assert documents.read(Completion, paths.complete).step == resolved.train.steps
    assert reads[manifest_uri] == 1, reads
