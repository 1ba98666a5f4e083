"""What an export is made of, and when it counts as one; a checkpoint of one tensor, no process group."""

import errno
import os
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.documents import entry_of
from helpers.fakes import full_disk
from helpers.pool import SERVER

from kftrain.checkpoint import chunks, export, exporting
from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError, RetryableError
from kftrain.run import commit
from kftrain.run.commit import CheckpointManifest, CheckpointName
from kftrain.run.export import is_export
from kftrain.run.paths import RunPaths

DESCRIPTION = export.Description(model={}, task={}, model_arguments={})


@pytest.fixture
def paths(tmp_path):
    return RunPaths.of(str(tmp_path), "r")


@pytest.fixture
def checkpoint_uri(paths):
    name = CheckpointName(10, 1)
    uri = storage.join(paths.checkpoints, str(name))
    with warnings.catch_warnings(action="ignore"):
        writer = dcp.filesystem.FileSystemWriter(uri)
        dcp.state_dict_saver.save({"model": {"weight": torch.ones(1000)}}, storage_writer=writer, no_dist=True)
    manifest = CheckpointManifest(
        step=10,
        samples_consumed=40,
        attempt=1,
        world_size=1,
        dataset_digest="d",
        training_digest="t",
        training_identity={},
        files={file: entry_of(storage.join(uri, file)) for file in storage.list_names(uri)},
    )
    commit.commit(paths, name, manifest)
    return uri


def export_it(paths, checkpoint_uri):
    return exporting.export_checkpoint(paths, checkpoint_uri, DESCRIPTION, {})


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_refused_before_anything_of_it_is_unpickled(paths, checkpoint_uri, file, monkeypatch):
    path = storage.local_path(storage.join(checkpoint_uri, file))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr(exporting, "_write_tensors", lambda *arguments: pytest.fail("was unpickled"))
    with pytest.raises(CheckpointError, match="its sha256 differs from the manifest"):
        export_it(paths, checkpoint_uri)
    assert storage.list_names(storage.join(paths.uri, "export")) == []


def test_an_export_that_is_whole_is_not_written_again(paths, checkpoint_uri, monkeypatch):
    before = export_it(paths, checkpoint_uri)
    monkeypatch.setattr(exporting, "_write_tensors", lambda *arguments: pytest.fail("was written again"))
    assert export_it(paths, checkpoint_uri) == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"half"),
        lambda folder: (folder / "manifest.json").write_text('{"files": '),
    ],
)
def test_an_export_that_lacks_something_is_written_anew(paths, checkpoint_uri, spoil):
    before = export_it(paths, checkpoint_uri)
    spoil(storage.local_path(before[0]))
    assert export_it(paths, checkpoint_uri) == before
    assert export.verify_export(*before).step == 10


def test_a_folder_that_cannot_be_replaced_gets_no_manifest(paths, checkpoint_uri, monkeypatch):
    """NFS keeps a deleted file that is still open as .nfs…, so the folder stays and ours is dropped."""
    uri = paths.export(commit.read_checkpoint_manifest(checkpoint_uri)[1])
    storage.publish(storage.join(uri, ".nfs0001"), "still open")
    remove = storage.remove
    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove", lambda target: None if target == uri else remove(target))
        with pytest.raises(RetryableError, match="other files"):
            export_it(paths, checkpoint_uri)
    assert not storage.exists(storage.join(uri, "manifest.json"))
    assert export.verify_export(*export_it(paths, checkpoint_uri)).step == 10


def test_others_can_read_every_file_of_an_export(paths, checkpoint_uri):
    """Evaluation and serving may run as another user, on the same volume."""
    folder = storage.local_path(export_it(paths, checkpoint_uri)[0])
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}
    assert set(modes) > {"model.safetensors", "manifest.json"} and set(modes.values()) == {"0o644"}


def hang(*arguments):
    time.sleep(600)


def write_half(*arguments):
    """As much as a file's header, and then nothing more."""
    yield torch.ones(10)
    hang()


PHASES = {
    "verifying": (commit, "verify_files", hang),
    "writing a file of tensors": (chunks.StoredChunks, "rows", write_half),
    "before the manifest": (storage, "publish_json", hang),
}


@pytest.mark.parametrize("phase", PHASES)
def test_an_export_whose_process_was_killed_counts_as_none_and_is_written_again(paths, checkpoint_uri, phase):
    uri = paths.export(commit.read_checkpoint_manifest(checkpoint_uri)[1])
    process = SERVER.Process(target=export_until, args=(paths, checkpoint_uri, phase, reached := SERVER.Event()))
    process.start()
    try:
        assert reached.wait(240)
    finally:
        process.kill()
        process.join()
    assert not is_export(uri)
    assert export.verify_export(*export_it(paths, checkpoint_uri)).step == 10


def export_until(paths, checkpoint_uri, phase, reached):
    owner, name, instead = PHASES[phase]

    def stop(*arguments):
        reached.set()
        return instead(*arguments)

    setattr(owner, name, stop)
    export_it(paths, checkpoint_uri)


def test_what_is_hashed_while_it_is_written_is_what_lies_there(paths, checkpoint_uri, monkeypatch):
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 100)
    uri, digest = export_it(paths, checkpoint_uri)
    files = export.verify_export(uri, digest).files
    assert {name: entry_of(storage.join(uri, name)) for name in files} == files


def test_an_object_store_gets_the_tensors_in_their_place_and_the_manifest_last(paths, checkpoint_uri, monkeypatch):
    remote = RunPaths.of("memory://exported", "r")
    expected = export_it(paths, checkpoint_uri)[1]
    monkeypatch.setattr(storage, "new_folder", lambda uri: pytest.fail("a copy of it all on this machine"))
    with monkeypatch.context() as patch:
        patch.setattr(chunks.StoredChunks, "rows", lambda *arguments: full())
        with pytest.raises(OSError, match="full"):
            export_it(remote, checkpoint_uri)
    uri = remote.export(commit.read_checkpoint_manifest(checkpoint_uri)[1])
    assert not is_export(uri) and "model.safetensors" not in storage.list_names(uri)
    assert export_it(remote, checkpoint_uri)[1] == expected
    storage.remove("memory://exported")


def full():
    yield torch.ones(10)
    raise OSError(28, "the disk is full")


def test_numbers_that_no_export_holds_are_refused_before_they_are_trained():
    model = torch.nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(2, dtype=torch.complex128), persistent=False)
    exporting.require_types(model)
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ConfigError, match=r"model phases: .*complex128"):
        exporting.require_types(model)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json"])
def test_a_disk_that_is_full_leaves_nothing_and_the_next_attempt_exports(paths, checkpoint_uri, monkeypatch, name):
    uri, publish = paths.export(commit.read_checkpoint_manifest(checkpoint_uri)[1]), storage.publish
    with monkeypatch.context() as patch:
        full_disk.fill(patch, name, 1)
        patch.setattr(
            storage, "publish", lambda target, data: refused(target) if name in target else publish(target, data)
        )
        with pytest.raises(OSError, match="No space left"):
            export_it(paths, checkpoint_uri)
    assert not is_export(uri)
    folder = storage.local_path(uri)
    left = [path for path in folder.parent.iterdir() if path != folder] if folder.parent.exists() else []
    assert left == []
    assert export.verify_export(*export_it(paths, checkpoint_uri)).step == 10


def refused(target):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)


def test_two_that_export_the_same_at_once_leave_one_whole_export(paths, checkpoint_uri, monkeypatch):
    """The second one begins, and ends, while the first one is about to write its manifest."""
    publish = storage.publish_json
    other = []

    def meanwhile(target, document):
        if not other:
            other.append("")
            other[0] = export_it(paths, checkpoint_uri)
        publish(target, document)

    monkeypatch.setattr(storage, "publish_json", meanwhile)
    found = export_it(paths, checkpoint_uri)
    assert found == other[0] and export.verify_export(*found).step == 10
