"""Sharding in a child process that is killed (-9) at one file operation after the other."""

import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from helpers.models.toy_task import ToyTask
from helpers.toy_data import shard_path, shard_toy, text_folder, toy_config

from kftrain.data.shards.manifest import MANIFEST_NAME, read_manifest
from kftrain.data.shards.verify import verify_shards
from kftrain.sharding import shard_dataset as sharding
from kftrain.sharding.shard_dataset import shard_dataset

FILE_OPERATIONS = frozenset(
    ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.listdir", "os.scandir")
)


def shard_and_die_at(operation: int, source: Path, root: Path, **data: int) -> bool:
    """Shards in a fork that kills itself before file operation number `operation`; whether it was killed."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    remaining = operation

    def count(event: str, arguments: object) -> None:
        nonlocal remaining
        if event in FILE_OPERATIONS:
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        shard_toy(source, root, **data)
    finally:
        os._exit(0)


def visible(root: Path) -> dict[str, bytes]:
    """Everything below the shards but what is being written."""
    shards = root / "shards"
    return {
        path.relative_to(shards).as_posix(): path.read_bytes()
        for path in sorted(shards.rglob("*"))
        if path.is_file()
        and path.name != "seen.json"  # times
        and not path.relative_to(shards).parts[0].startswith(".tmp-")
        and not path.name.startswith(".tmp-")
    }


@pytest.mark.timeout(900)
def test_killed_at_any_operation_nothing_half_is_seen_and_a_rerun_equals_the_clean_result(tmp_path: Path) -> None:
    source = text_folder(tmp_path / "texts", 8)
    shard_toy(source, tmp_path / "clean")
    clean = visible(tmp_path / "clean")
    operation, killed = 0, True
    while killed:
        root = tmp_path / f"root-{operation}"
        killed = shard_and_die_at(operation, source, root)
        for folder in (root / "shards").glob("[0-9a-f]" * 64):
            uri = str(folder / MANIFEST_NAME)
            verify_shards(uri, read_manifest(uri))
        assert set(visible(root).items()) <= set(clean.items())
        shard_toy(source, root)
        assert visible(root) == clean
        operation += 2
    assert operation > 60


@pytest.mark.timeout(900)
def test_killed_while_replacing_damaged_shards_a_rerun_repairs_them(tmp_path: Path) -> None:
    source = text_folder(tmp_path / "texts", 8)
    shard_toy(source, tmp_path / "clean")
    clean = visible(tmp_path / "clean")
    operation, killed = 30, True
    while killed:
        root = tmp_path / f"root-{operation}"
        shard_path(shard_toy(source, root)).write_bytes(b"damaged")
        killed = shard_and_die_at(operation, source, root)
        shard_toy(source, root)
        assert visible(root) == clean
        operation += 7


def finished_parts(root: Path) -> dict[Path, os.stat_result]:
    """The files of all parts that a rerun will find."""
    parts = root / "shards" / "parts"
    pointers = (json.loads(path.read_text()) for path in (parts / "by-input").glob("*.json"))
    return {
        path: path.stat() for pointer in pointers for path in sorted((parts / str(pointer["part_digest"])).iterdir())
    }


@pytest.mark.timeout(200)
def test_killed_at_ten_points_a_rerun_writes_no_part_again_that_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "LISTING_SHARE", 1e9)  # parts are kept one by one, however slow the disk is
    source = text_folder(tmp_path / "texts", 100)
    data = {"part_size_bytes": 1 << 16, "processes": 1}
    shard_toy(source, tmp_path / "clean", **data)
    clean, num_finished = visible(tmp_path / "clean"), []
    for operation in sorted(random.Random(7).sample(range(40, 400), 10)):
        root = tmp_path / f"root-{operation}"
        assert shard_and_die_at(operation, source, root, **data)
        finished = finished_parts(root)
        num_finished.append(len({path.parent for path in finished}))
        lines: list[str] = []
        shard_dataset(toy_config(source, root, **data), ToyTask(), lines.append)
        assert sum(line.endswith("(was there)") for line in lines) == num_finished[-1]
        assert visible(root) == clean
        kept = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in finished}
        assert kept == {path: (status.st_ino, status.st_mtime_ns) for path, status in finished.items()}
    assert num_finished == sorted(num_finished) and len(set(num_finished)) > 3
