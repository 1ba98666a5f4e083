"""Data that is gone is noticed before a job is started for it."""

import pytest
from helpers.documents import sharded_run

from kftrain import launch, storage
from kftrain.errors import DataError
from kftrain.stages import failure
from kftrain.stages.train import train


@pytest.mark.parametrize("name", ["train-000000.tar", "validation-000000.tar", "train-000000.index.npy"])
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b""), "truncated or changed: it has 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-512]), "truncated or changed"),
    ],
    ids=["missing", "zero bytes", "cut"],
)
def test_fault_05_a_shard_that_is_gone_ends_the_stage_before_any_job(tmp_path, monkeypatch, name, damage, what):
    paths, _, shards = sharded_run(tmp_path)
    damage(storage.local_path(shards.manifest_uri).parent / name)
    monkeypatch.setattr(launch, "run_training", lambda *arguments: pytest.fail("a job was started"))
    with pytest.raises(DataError, match=f"{name}: {what}"):
        train(paths.uri, lambda line: None)
    assert (failure.read(paths)["exit_code"], failure.read(paths)["stage"]) == (11, "train")
