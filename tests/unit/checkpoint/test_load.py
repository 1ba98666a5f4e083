"""Which checkpoint is chosen, and what becomes of those that are not; one process, no tensors."""

import pytest
from helpers.documents import entry_of

from kftrain.checkpoint import load
from kftrain.core import storage
from kftrain.errors import CheckpointError, FencedError, RetryableError
from kftrain.run import attempts, commit
from kftrain.run.commit import CheckpointManifest, CheckpointName
from kftrain.run.paths import RunPaths

IDENTITY = {"seed": 0, "order": 2}


class Alone:
    """A world of one process."""

    rank = 0
    size = 1
    is_main = True

    def from_main(self, value):
        return value

    def gather(self, value):
        return [value]

    gather_slowly = gather


@pytest.fixture
def paths(tmp_path):
    return RunPaths.of(str(tmp_path), "r")


def write(paths, step, attempt=1):
    name = CheckpointName(step, attempt)
    uri = storage.join(paths.checkpoints, str(name))
    storage.publish(storage.join(uri, "__0_0.distcp"), b"state")
    storage.publish_json(storage.join(uri, commit.HISTORY), [{"step": step}])
    manifest = CheckpointManifest(
        step=step,
        samples_consumed=step * 4,
        attempt=attempt,
        world_size=1,
        dataset_digest="d",
        training_digest="t",
        training_identity=IDENTITY,
        files={file: entry_of(storage.join(uri, file)) for file in ("__0_0.distcp", commit.HISTORY)},
    )
    commit.commit(paths, name, manifest)
    return uri


def damage(uri):
    storage.publish(storage.join(uri, "__0_0.distcp"), b"stale")


def choose(paths):
    return load.choose_checkpoint(paths, Alone(), IDENTITY)


def committed_steps(paths):
    return [name.step for name in commit.list_committed(paths)]


def test_damaged_checkpoints_lose_their_markers_once_a_good_one_is_found(paths):
    good = write(paths, 10)
    damage(write(paths, 20))
    damage(write(paths, 30))
    loaded = choose(paths)
    assert (loaded.uri, loaded.manifest.step, loaded.history) == (good, 10, [{"step": 10}])
    assert committed_steps(paths) == [10]


@pytest.mark.parametrize("reads", ["size_bytes", "sha256_file", "read_bytes"])
def test_an_outage_while_checkpoints_are_checked_damages_none(paths, monkeypatch, reads):
    """Else the newest one would be passed over for good."""
    write(paths, 10)
    write(paths, 20)

    def away(uri):
        raise RetryableError("storage cannot be reached", where=uri)

    with monkeypatch.context() as patched, pytest.raises(RetryableError):
        patched.setattr(storage, reads, away)
        choose(paths)
    assert committed_steps(paths) == [20, 10]
    assert choose(paths).manifest.step == 20


def test_where_all_are_damaged_every_start_says_so_and_none_is_touched(paths):
    for step in (10, 20):
        damage(write(paths, step))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="all 2 committed checkpoints are damaged"):
            choose(paths)
    assert committed_steps(paths) == [20, 10]


def test_a_checkpoint_that_is_retired_while_it_is_read_is_not_damaged(paths, monkeypatch, capsys):
    """The attempt before commits the next one meanwhile, and keeps only that."""
    write(paths, 10)
    verify = commit.verify_files

    def retired(uri, files, share):
        if uri.endswith("step-00000010-a1"):
            write(paths, 20)
            commit.retire_checkpoints(paths, keep_last=1, attempt=1)
        verify(uri, files, share)

    monkeypatch.setattr(commit, "verify_files", retired)
    assert choose(paths).manifest.step == 20
    assert "warning" not in capsys.readouterr().err


def test_a_file_that_vanishes_between_its_size_and_its_digest_is_missing(paths, monkeypatch):
    uri = write(paths, 10)
    manifest, _ = commit.read_checkpoint_manifest(uri)
    size_bytes = storage.size_bytes

    def then_retired(where):
        size = size_bytes(where)
        storage.remove(where)
        return size

    monkeypatch.setattr(storage, "size_bytes", then_retired)
    with pytest.raises(CheckpointError, match="missing"):
        commit.verify_files(uri, manifest.files)


def test_a_run_that_never_committed_starts_from_scratch(paths):
    attempts.claim_run(paths, 0, 1)
    storage.publish(storage.join(paths.checkpoints, "step-00000010-a1", "__0_0.distcp"), b"half")
    assert choose(paths) is None


def test_a_run_that_has_lost_its_commits_does_not_start_from_scratch(paths):
    attempts.claim_run(paths, 10, 1)
    attempts.claim_run(paths, 0, 1)
    assert choose(paths) is None  # somebody has deleted them all
    storage.remove(storage.join(write(paths, 10, attempt=2), commit.COMMITTED))
    with pytest.raises(CheckpointError, match="an attempt went on after step 10"):
        choose(paths)


def test_another_training_is_refused_before_the_run_is_claimed(paths):
    load.refuse_another_training(paths, Alone(), IDENTITY)
    uri = write(paths, 10)
    load.refuse_another_training(paths, Alone(), IDENTITY)
    with pytest.raises(CheckpointError, match="another training"):
        load.refuse_another_training(paths, Alone(), {"seed": 1})
    storage.publish(storage.join(uri, commit.MANIFEST), "{")
    load.refuse_another_training(paths, Alone(), {"seed": 1})


def test_a_fenced_attempt_retires_nothing(paths):
    attempts.claim_run(paths, 0, 1)
    write(paths, 10)
    write(paths, 20)
    attempts.claim_run(paths, 20, 1)
    with pytest.raises(FencedError):
        commit.retire_checkpoints(paths, keep_last=1, attempt=1)
    assert committed_steps(paths) == [20, 10]
