import hashlib
import random

import pytest
from helpers.documents import entry_of

from kftrain.core import storage
from kftrain.errors import CheckpointError, FencedError
from kftrain.run import attempts, commit
from kftrain.run.commit import CheckpointManifest, CheckpointName
from kftrain.run.paths import RunPaths

IDENTITY = {"seed": 0, "train": {"steps": 10}, "order": 2}


@pytest.fixture
def paths(tmp_path):
    return RunPaths.of(str(tmp_path), "r")


def write(paths, step, attempt, *, marker=True, content=b"state"):
    """A checkpoint as a writer makes it, committed or left half-done."""
    name = CheckpointName(step, attempt)
    uri = storage.join(paths.checkpoints, str(name))
    storage.publish(storage.join(uri, "__0_0.distcp"), content)
    manifest = CheckpointManifest(
        step=step,
        samples_consumed=step * 4,
        attempt=attempt,
        world_size=1,
        dataset_digest="d",
        training_digest="t",
        training_identity=IDENTITY,
        files={"__0_0.distcp": entry_of(storage.join(uri, "__0_0.distcp"))},
    )
    if marker:
        commit.commit(paths, name, manifest)
    return uri


def test_a_checkpoint_without_its_marker_does_not_exist(paths):
    write(paths, 10, 1)
    write(paths, 20, 1, marker=False)
    assert [name.step for name in commit.list_committed(paths)] == [10]
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        commit.read_checkpoint_manifest(storage.join(paths.checkpoints, str(CheckpointName(20, 1))))


def test_a_checkpoint_of_an_earlier_version_is_read_as_it_was_written(paths):
    """A field that has come since, with its default, makes another text: what counts is the text that was committed."""
    uri = storage.join(paths.checkpoints, "step-00000010-a1")
    content = """{
 "attempt": 1,
 "dataset_digest": "d",
 "files": {},
 "samples_consumed": 40,
 "schema_version": 1,
 "step": 10,
 "training_digest": "t",
 "training_identity": {},
 "world_size": 1
}
"""
    storage.publish(storage.join(uri, "manifest.json"), content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    storage.publish(storage.join(uri, "COMMITTED"), digest + "\n")
    manifest, actual = commit.read_checkpoint_manifest(uri)
    assert (manifest.step, actual) == (10, digest)


def test_newest_first_by_step_then_attempt(paths):
    for step, attempt in [(10, 1), (20, 1), (20, 2), (9, 3)]:
        write(paths, step, attempt)
    assert [(n.step, n.attempt) for n in commit.list_committed(paths)] == [(20, 2), (20, 1), (10, 1), (9, 3)]
    assert commit.find_last_step(paths) == 20


def test_a_stale_attempt_cannot_commit(paths):
    first = attempts.claim_run(paths, 0, 1)
    second = attempts.claim_run(paths, 0, 1)
    assert (first, second) == (1, 2)
    with pytest.raises(FencedError):
        write(paths, 10, first)
    assert commit.list_committed(paths) == []
    write(paths, 10, second)
    assert commit.find_last_step(paths) == 10


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_a_damaged_file_is_found_and_named(paths, damage):
    uri = write(paths, 10, 1, content=bytes(1000))
    path = storage.local_path(storage.join(uri, "__0_0.distcp"))
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    {
        "flip": lambda: path.write_bytes(content),
        "truncate": lambda: path.write_bytes(content[:-1]),
        "remove": path.unlink,
        "empty": lambda: path.write_bytes(b""),
    }[damage]()
    manifest, _ = commit.read_checkpoint_manifest(uri)
    with pytest.raises(CheckpointError) as caught:
        commit.verify_files(uri, manifest.files)
    assert "__0_0.distcp" in caught.value.line


def test_a_changed_manifest_is_not_the_committed_one(paths):
    uri = write(paths, 10, 1)
    manifest_uri = storage.join(uri, commit.MANIFEST)
    storage.publish_json(manifest_uri, {**storage.read_json(manifest_uri), "step": 11})
    with pytest.raises(CheckpointError, match="not the one that was committed"):
        commit.read_checkpoint_manifest(uri)


@pytest.mark.parametrize("damage", [b"\x80", b"\xff" * 65, b"", b"not a digest\n"])
def test_a_damaged_marker_is_a_damaged_checkpoint(paths, damage):
    uri = write(paths, 10, 1)
    storage.publish(storage.join(uri, commit.COMMITTED), damage)
    with pytest.raises(CheckpointError, match="not the one that was committed"):
        commit.read_checkpoint_manifest(uri)


def test_a_step_of_any_size_is_found_and_ordered(paths):
    steps = [1, 99_999_999, 100_000_000, 123_456_789_012]
    for step in steps:
        write(paths, step, 1)
    assert [name.step for name in commit.list_committed(paths)] == steps[::-1]
    commit.retire_checkpoints(paths, keep_last=1, attempt=1)
    assert storage.list_names(paths.checkpoints) == ["step-123456789012-a1"]


FOREIGN = [
    "step-5",
    "step-000000005-a1",
    "step-00000005-a01",
    "step-00000005-a\uff11",
    "step-0000000\u0665-a1",
    "notes.txt",
    "best",
]


@pytest.mark.parametrize("kind", ["file", "folder", "committed folder", "dangling link"])
def test_what_others_put_among_the_checkpoints_is_left_alone(paths, kind):
    write(paths, 10, 1)
    folder = storage.local_path(paths.checkpoints)
    for name in FOREIGN:
        if kind == "file":
            (folder / name).write_text("mine")
        elif kind == "dangling link":
            (folder / name).symlink_to("nowhere")
        else:
            (folder / name).mkdir()
            if "committed" in kind:
                (folder / name / commit.COMMITTED).write_text("mine")
    assert [str(name) for name in commit.list_committed(paths)] == ["step-00000010-a1"]
    write(paths, 20, 2)
    commit.retire_checkpoints(paths, keep_last=1, attempt=2)
    assert set(storage.list_names(paths.checkpoints)) == {*FOREIGN, "step-00000020-a2"}


def test_a_file_that_has_a_checkpoints_name_is_no_checkpoint(paths):
    write(paths, 10, 1)
    (storage.local_path(paths.checkpoints) / "step-00000020-a1").write_text("mine")
    assert commit.find_last_step(paths) == 10
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        commit.read_checkpoint_manifest(storage.join(paths.checkpoints, "step-00000020-a1"))


def test_another_training_is_refused_with_the_fields_that_differ(paths):
    uri = write(paths, 10, 1)
    manifest, _ = commit.read_checkpoint_manifest(uri)
    commit.require_same_training(manifest, IDENTITY, uri)
    with pytest.raises(CheckpointError) as caught:
        commit.require_same_training(manifest, {**IDENTITY, "seed": 1, "new": 2}, uri)
    assert "seed: 0 -> 1" in caught.value.line
    assert "new: None -> 2" in caught.value.line
    assert "steps" not in caught.value.line


def test_retiring_keeps_the_newest_and_what_the_present_attempt_is_writing(paths):
    for step in (10, 20, 30):
        write(paths, step, 1)
    write(paths, 25, 1, marker=False)
    write(paths, 40, 2)
    write(paths, 50, 2, marker=False)
    commit.retire_checkpoints(paths, keep_last=2, attempt=2)
    assert storage.list_names(paths.checkpoints) == ["step-00000030-a1", "step-00000040-a2", "step-00000050-a2"]


@pytest.mark.parametrize("seed", range(200))
def test_what_is_kept_is_the_newest_the_best_and_every_so_many_steps(seed):
    drawn = random.Random(seed)
    steps, keep_last = drawn.sample(range(1, 40), drawn.randint(0, 20)), drawn.randint(1, 5)
    best_step, keep_every = drawn.choice([0, *steps]), drawn.choice([0, 1, 3, 7, 100])
    names = sorted((commit.CheckpointName(step, drawn.randint(1, 3)) for step in steps), reverse=True)
    kept = {name.step for name in commit.choose_kept(names, keep_last, best_step, keep_every)}
    assert kept == {
        step
        for step in steps
        if sum(other > step for other in steps) < keep_last
        or step == best_step
        or (keep_every and step in range(0, 40, keep_every))
    }


def test_what_is_kept_for_good_survives_all_commits_that_follow(paths):
    for step in range(10, 90, 10):
        write(paths, step, 1)
        commit.retire_checkpoints(paths, keep_last=1, attempt=1, keep_every=30)
    assert [name.step for name in commit.list_committed(paths)] == [80, 60, 30]


def test_progress_shows_in_the_claims(paths):
    assert attempts.read_last_start_step(paths) == -1
    attempts.claim_run(paths, 0, 2)
    assert attempts.read_last_start_step(paths) == 0
    attempts.claim_run(paths, 40, 3)
    assert (attempts.find_last_attempt(paths), attempts.read_last_start_step(paths)) == (2, 40)


class Crash(Exception):  # noqa: N818
    """The process dies here."""


def crash_after(monkeypatch, num_effects):
    """Lets so many storage effects happen, then dies before the next."""
    left = [num_effects]

    def counted(effect):
        def run(*arguments, **options):
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return effect(*arguments, **options)

        return run

    for name in ("publish", "publish_json", "create", "remove"):
        monkeypatch.setattr(storage, name, counted(getattr(storage, name)))
    return left


def test_at_every_crash_point_the_newest_checkpoint_is_whole_and_never_older_than_before(tmp_path, monkeypatch):
    points = 0
    for num_effects in range(40):
        paths = RunPaths.of(str(tmp_path / str(num_effects)), "r")
        write(paths, 10, 1)
        write(paths, 20, 1)
        finished = False
        with monkeypatch.context() as patch:
            crash_after(patch, num_effects)
            try:
                write(paths, 30, 1)
                commit.retire_checkpoints(paths, keep_last=1, attempt=1)
                finished = True
            except Crash:
                points += 1
        newest = commit.list_committed(paths)[0]
        assert newest.step in (20, 30)
        manifest, _ = commit.read_checkpoint_manifest(storage.join(paths.checkpoints, str(newest)))
        commit.verify_files(storage.join(paths.checkpoints, str(newest)), manifest.files)
        if finished:
            break
    assert finished and points >= 7
