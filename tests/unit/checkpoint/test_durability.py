"""What a power cut may take: nothing that COMMITTED vouches for.

The oracle knows the disk, not the code: it notes what each file held and what each folder listed when `os.fsync` was
called for it, and looks at the moment at which COMMITTED gets its name.
"""

import os
import stat

import pytest
from helpers import checkpoints

from kftrain.core import storage
from kftrain.data.shards import staging
from kftrain.run import attempts, commit
from kftrain.run.paths import RunPaths


class Disk:
    """What would be left after a power cut."""

    def __init__(self):
        self.sizes = {}
        """File by inode -> bytes that are durable."""
        self.names = {}
        """Folder by inode -> names that are durable."""

    def sync(self, descriptor):
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = set(os.listdir(descriptor))
        else:
            self.sizes[found.st_ino] = found.st_size

    def lost_of(self, folder, but=()):
        """What is in the folder now, and would not be there after a power cut."""
        inode = os.stat(folder).st_ino
        lost = {name for name in os.listdir(folder) if name not in self.names.get(inode, ())}
        for name in os.listdir(folder):
            found = os.stat(os.path.join(folder, name))
            if stat.S_ISREG(found.st_mode) and self.sizes.get(found.st_ino) != found.st_size:
                lost.add(name)
        return lost - set(but)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    before = os.fsync

    def recorded(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        disk.sync(number)
        before(number)

    monkeypatch.setattr(os, "fsync", recorded)
    return disk


def test_when_a_checkpoint_gets_its_marker_everything_that_it_vouches_for_is_durable(tmp_path, disk, monkeypatch):
    root = tmp_path / "store"
    root.mkdir()
    paths = RunPaths.of(str(root), "r")
    attempts.claim_run(paths, 0, 1)
    looked = []
    replace = os.replace

    def look(source, target):
        if os.path.basename(target) == commit.COMMITTED:
            folder = os.path.dirname(target)
            assert {"__0_0.distcp", ".metadata", "history.json", "manifest.json"} <= set(os.listdir(folder))
            assert disk.lost_of(folder, but=[os.path.basename(source)]) == set()
            for above in (paths.checkpoints, paths.uri, str(root / "runs"), str(root)):
                assert disk.lost_of(above) == set(), above
            assert os.stat(source).st_ino in disk.sizes
            looked.append(folder)
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    with checkpoints.alone() as world:
        writer = checkpoints.writer_of(paths, world)
        for step in (1, 2):
            checkpoints.save(writer, step)
            assert disk.lost_of(os.path.join(paths.checkpoints, f"step-{step:08d}-a1")) == set()
    assert len(looked) == 2


def write_in_pieces(uri, content):
    with storage.open_write(uri) as stream:
        stream.write(content.encode())


def publish_as_a_folder(uri, content):
    with storage.new_folder(os.path.dirname(uri)) as folder:
        (folder / os.path.basename(uri)).write_text(content)


def publish_as_shards(uri, content):
    target = os.path.dirname(uri)
    with staging.staging_folder(os.path.dirname(target)) as folder:
        (folder / os.path.basename(uri)).write_text(content)
        staging.publish_folder(folder, target, os.path.basename(uri), lambda uri: True)


WRITES = [storage.publish, storage.create, write_in_pieces, publish_as_a_folder, publish_as_shards]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_published_is_durable_with_all_the_folders_above_it(tmp_path, disk, write):
    write(str(tmp_path / "a" / "b" / "file"), "content")
    for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        assert disk.lost_of(folder) == set(), folder
