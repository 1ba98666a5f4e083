"""Sharding in a child process that is killed (-9) at one file operation after the other."""

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.toy_data import shard_toy, text_folder

from kftrain.data.shards.manifest import MANIFEST_NAME, verify_shards

FILE_OPERATIONS = frozenset(
    ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.listdir", "os.scandir")
)


def shard_and_die_at(operation: int, source: Path, root: Path) -> bool:
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
        shard_toy(source, root)
    finally:
        os._exit(0)


def visible(root: Path) -> dict[str, bytes]:
    """Everything below the shards but what is being written."""
    shards = root / "shards"
    return {
        path.relative_to(shards).as_posix(): path.read_bytes()
        for path in sorted(shards.rglob("*"))
        if path.is_file()
        and not path.relative_to(shards).parts[0].startswith(".tmp-")
        and not path.name.startswith(".tmp-")
    }


@pytest.mark.timeout(120)
def test_killed_at_any_operation_nothing_half_is_seen_and_a_rerun_equals_the_clean_result(tmp_path: Path) -> None:
    source = text_folder(tmp_path / "texts", 8)
    shard_toy(source, tmp_path / "clean")
    clean = visible(tmp_path / "clean")
    operation, killed = 0, True
    while killed:
        root = tmp_path / f"root-{operation}"
        killed = shard_and_die_at(operation, source, root)
        for folder in (root / "shards").glob("[0-9a-f]" * 64):
            verify_shards(str(folder / MANIFEST_NAME))
        assert set(visible(root).items()) <= set(clean.items())
        shard_toy(source, root)
        assert visible(root) == clean
        operation += 2
    assert operation > 60


@pytest.mark.timeout(120)
def test_killed_while_replacing_damaged_shards_a_rerun_repairs_them(tmp_path: Path) -> None:
    source = text_folder(tmp_path / "texts", 8)
    digest = shard_toy(source, tmp_path / "clean").dataset_digest
    clean = visible(tmp_path / "clean")
    operation, killed = 30, True
    while killed:
        root = tmp_path / f"root-{operation}"
        shard_toy(source, root)
        (root / "shards" / digest / "train-000000.tar").write_bytes(b"damaged")
        killed = shard_and_die_at(operation, source, root)
        shard_toy(source, root)
        assert visible(root) == clean
        operation += 7
