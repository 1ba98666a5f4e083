"""Faults of the data, by their numbers in the catalogue: damage is named before a step, or before a commit.

| fault | what | test |
|---|---|---|
| 1 | tar cut at the border of a member | as 5 |
| 2 | tar cut in the middle of a member | as 5 |
| 3 | flipped bit of a header | `test_fault_03_04_…` here |
| 4 | flipped bit of a payload | `test_fault_03_04_…` here |
| 5 | shard missing or empty | `tests/unit/stages/test_lost_shards.py`; after it: `test_fault_01_02_05_…` here |
| 6 | sharder killed | `tests/unit/sharding/test_sharding_killed.py` |
| 7, 13 | shares that do not divide, another world | `tests/unit/data/test_training_order.py`, `test_batch_plan.py` |
| 9, 11 | bad sample, worker killed | `tests/unit/data/test_workers.py`, `tests/distributed/test_data_workers.py` |
| 12 | read that never returns | here (pipe, hanging hash), `tests/unit/data/test_loader_outages.py` (store) |
| 14 | dataset changed between save and resume | `test_fault_14_…` here |
| 15 | shards deleted behind a run that names them | `test_fault_15_…` here; before a job: as 5 |
| 16 | store that fails | `tests/unit/data/test_loader_outages.py` |
"""

import os
import shutil
import threading

import pytest
from helpers import in_process, jobs
from helpers.splits import open_split

from kftrain.checkpoint.save import CheckpointWriter
from kftrain.core import storage
from kftrain.data.shards.manifest import read_manifest, shard_uri
from kftrain.errors import CheckpointError, DataError
from kftrain.evaluate.session import evaluate
from kftrain.run import attempts, commit

BLOCK = 512

OVERRIDES = ["train.steps=2", "checkpoint.interval_steps=1"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return jobs.make_run(tmp_path, [*OVERRIDES, f"data.cache_dir={tmp_path}/cache"])


def shard_of(paths, name):
    """The file of the first shard of a split."""
    uri = storage.read_json(paths.shards)["manifest_uri"]
    return storage.local_path(shard_uri(uri, read_manifest(uri).splits[name.split("-")[0]].shards[0]))


def cut(length):
    return lambda path: path.write_bytes(path.read_bytes()[:length])


@pytest.mark.parametrize("name", ["train-000000.tar", "validation-000000.tar"])
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (cut(-2 * BLOCK), "truncated or changed"),
        (cut(BLOCK + 100), "truncated or changed"),
        (cut(0), "truncated or changed: it has 0 bytes"),
        (lambda path: path.unlink(), "missing"),
    ],
    ids=["fault 1: at a border", "fault 2: in a member", "fault 5: empty", "fault 5: missing"],
)
def test_fault_01_02_05_nothing_of_a_shard_that_is_torn_after_the_stage_looked_is_committed(
    run, tmp_path, monkeypatch, name, damage, what
):
    paths, _ = run
    resolved = jobs.make_run(tmp_path, [*OVERRIDES, "evaluate.interval_steps=1"])[1]
    damage(shard_of(paths, name))
    with pytest.raises(DataError, match=f"{name}: {what}") as caught:
        in_process.train(paths, resolved, monkeypatch)
    assert caught.value.exit_code == 11
    assert commit.list_committed(paths) == [] and not storage.exists(paths.complete)


def flip(path, position):
    """One bit, and nothing else that could be seen without reading."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[position] ^= 1
    with path.open("r+b") as stream:
        stream.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def late(monkeypatch):
    """Shards are hashed only when a checkpoint has been written, and waits to be committed."""
    written, hash_file, write = threading.Event(), storage.sha256_file, CheckpointWriter._write_files

    def hash_late(uri):
        assert not uri.endswith(".tar") or written.wait(240)
        return hash_file(uri)

    def write_first(*arguments):
        try:
            return write(*arguments)
        finally:
            written.set()

    monkeypatch.setattr(storage, "sha256_file", hash_late)
    monkeypatch.setattr(CheckpointWriter, "_write_files", write_first)


@pytest.mark.parametrize("position", [3, BLOCK + 200], ids=["fault 3: header", "fault 4: payload"])
def test_fault_03_04_nothing_that_a_flipped_bit_has_touched_is_committed(run, monkeypatch, late, position):
    paths, resolved = run
    flip(shard_of(paths, "train-000000.tar"), position)
    with pytest.raises(DataError, match=r"train-000000\.tar: its content has changed") as caught:
        in_process.train(paths, resolved, monkeypatch)
    assert caught.value.exit_code == 11
    assert commit.list_committed(paths) == [] and not storage.exists(paths.complete)


def test_fault_04_no_figures_of_a_damaged_validation_split_are_published(run, monkeypatch):
    paths, resolved = run
    in_process.train(paths, resolved, monkeypatch)
    jobs.request_evaluation(paths)
    flip(shard_of(paths, "validation-000000.tar"), BLOCK + 200)
    with (
        pytest.raises(DataError, match=r"validation-000000\.tar: its content has changed"),
        in_process.alone(monkeypatch),
    ):
        evaluate(paths, resolved)
    assert not any(name == "metrics.json" for _, _, names in os.walk(storage.local_path(paths.uri)) for name in names)


def test_fault_12_a_pipe_in_place_of_a_shard_is_not_waited_for(run):
    paths, _ = run
    shard = shard_of(paths, "train-000000.tar")
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(DataError, match=r"train-000000\.tar: missing"):
        open_split(storage.read_json(paths.shards)["manifest_uri"], "train").read_range(0, 1)


def test_fault_14_a_dataset_that_changed_between_save_and_resume_is_refused_digests(run, monkeypatch, tmp_path):
    paths, resolved = run
    in_process.train(paths, resolved, monkeypatch)
    before = storage.read_json(paths.shards)["dataset_digest"]
    storage.remove(paths.complete)
    texts = jobs.TINY.replace("SOURCE", str(jobs.write_texts(tmp_path / "other", num_files=12)))
    paths_of_other, _ = jobs.prepare(tmp_path, texts)
    after = storage.read_json(paths_of_other.shards)["dataset_digest"]
    assert after != before and paths_of_other.shards == paths.shards
    with pytest.raises(CheckpointError, match=f"dataset: '{before}' -> '{after}'") as caught:
        in_process.train(paths, resolved, monkeypatch)
    assert attempts.find_last_attempt(paths) == 1, caught.value


def test_fault_15_a_run_whose_shards_were_deleted_says_what_to_run(run, monkeypatch):
    paths, resolved = run
    manifest_uri, shard = storage.read_json(paths.shards)["manifest_uri"], shard_of(paths, "train-000000.tar")
    manifest = storage.read_bytes(manifest_uri)
    storage.remove(manifest_uri)
    with pytest.raises(DataError, match=r"manifest\.json is missing; run the stage"):
        in_process.train(paths, resolved, monkeypatch)
    storage.publish(manifest_uri, manifest)
    shutil.rmtree(shard.parent)
    with pytest.raises(
        DataError, match=r"train-000000\.index\.npy: missing; shard the data again: kftrain shard"
    ) as caught:
        in_process.train(paths, resolved, monkeypatch)
    assert caught.value.exit_code == 11
