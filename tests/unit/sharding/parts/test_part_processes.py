"""Parts that several processes encode: the bytes are those of one process, and errors are those of one process."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from helpers.fakes import object_store
from helpers.splits import open_split
from helpers.toy_data import text_folder, toy_config

from kftrain.core import storage
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.shards.verify import verify_shards
from kftrain.errors import DataError, RetryableError, UserCodeError
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks import build_task
from kftrain.tasks.settings import TaskConfig
from kftrain.trust import permit

PART_BYTES = 1 << 16


def shard(source, root, kind="helpers.models.toy_task:ToyTask", progress=lambda line: None, **data):
    config = toy_config(source, root, **{"part_size_bytes": PART_BYTES, **data})
    config = permit(config.model_copy(update={"task": TaskConfig(kind=kind)}))
    return shard_dataset(config, build_task(config.task), progress)


def files(root: Path) -> dict[str, bytes]:
    shards = root / "shards"
    paths = [path for path in shards.rglob("*") if path.is_file() and path.name != "seen.json"]  # that holds times
    return {path.relative_to(shards).as_posix(): path.read_bytes() for path in paths}


def test_the_number_of_processes_changes_nothing(tmp_path):
    source = text_folder(tmp_path / "texts", 120)
    lines = []
    results = [shard(source, tmp_path / f"{n}", processes=n, progress=lines.append) for n in (1, 2, 3)]
    assert len({result.dataset_digest for result in results}) == 1
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "3")
    folders = {shard.folder for shard in results[0].manifest.splits["train"].shards}
    assert len(folders) >= 4 and any("part 4 of" in line for line in lines)


def test_parts_and_shards_of_any_size_hold_the_samples_in_one_order(tmp_path):
    source = text_folder(tmp_path / "texts", 120)
    found = []
    for number, sizes in enumerate([(1 << 16, 1 << 16), (1 << 18, 1 << 16), (1 << 30, 1 << 17)]):
        result = shard(source, tmp_path / f"{number}", part_size_bytes=sizes[0], shard_size_bytes=sizes[1])
        found.append([open_split(result.manifest_uri, split).group_keys() for split in ("train", "validation")])
    expected = sorted(path.relative_to(source).as_posix() for path in source.rglob("*.txt"))
    assert found[0] == found[1] == found[2]
    assert sorted([*found[0][0], *found[0][1]]) == expected and all(keys == sorted(keys) for keys in found[0])


TASKS = """
import os, signal
from helpers.models.toy_task import ToyTask


class Raising(ToyTask):
    def encode(self, records, split):
        for block in super().encode(records, split):
            if block.key == "part/doc-001.txt":
                raise KeyError("boom")
            yield block


class Killed(ToyTask):
    def encode(self, records, split):
        for block in super().encode(records, split):
            if block.key == "part/doc-001.txt":
                os.kill(os.getpid(), signal.SIGKILL)
            yield block
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_part_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def test_what_a_task_raises_in_a_process_is_raised_here(tmp_path, tasks):
    with pytest.raises(UserCodeError, match="KeyError: 'boom'") as caught:
        shard(text_folder(tmp_path / "texts"), tmp_path / "root", "own_part_tasks:Raising", processes=2)
    assert caught.value.exit_code == 16


def test_a_bad_record_is_named_by_whichever_process_reads_it(tmp_path):
    source = text_folder(tmp_path / "texts")
    (source / "part" / "doc-010.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"doc-010\.txt: not UTF-8"):
        shard(source, tmp_path / "root", processes=2)


def test_a_process_that_is_killed_is_an_error_that_another_attempt_may_not_see(tmp_path, tasks):
    source = text_folder(tmp_path / "texts")
    with pytest.raises(RetryableError, match="was killed by SIGKILL") as caught:
        shard(source, tmp_path / "root", "own_part_tasks:Killed", processes=2)
    assert caught.value.exit_code == 138


def test_the_processes_end_with_the_one_that_started_them(tmp_path):
    source = text_folder(tmp_path / "texts")
    (tmp_path / "slow_part_task.py").write_text(
        textwrap.dedent(f"""
        import os, time
        from pathlib import Path
        from helpers.models.toy_task import ToyTask

        class Slow(ToyTask):
            def encode(self, records, split):
                Path({str(tmp_path)!r}, f"pid-{{os.getpid()}}").touch()
                time.sleep(1000)
                yield
        """)
    )
    code = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_part_processes import shard
        shard({str(source)!r}, {str(tmp_path / "root")!r}, "slow_part_task:Slow", processes=2)
    """
    path = os.pathsep.join([str(tmp_path), *sys.path])
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": path})
    while len(pids := [int(each.name[4:]) for each in tmp_path.glob("pid-*")]) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert parent.pid not in pids
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            time.sleep(0.05)


def test_an_object_store_gets_the_same_parts_and_what_describes_one_last(tmp_path, monkeypatch):
    source = text_folder(tmp_path / "texts", 120)
    here = shard(source, tmp_path / "root", processes=1)
    order = []
    publish = storage.publish
    monkeypatch.setattr(storage, "publish", lambda uri, data: (order.append(uri), publish(uri, data))[1])
    there = shard(source, "memory://part-test", processes=1)
    assert there.dataset_digest == here.dataset_digest
    assert read_manifest(there.manifest_uri).splits == here.manifest.splits
    by_part: dict[str, list[str]] = {}
    for uri in order:
        folder, _, name = uri.rpartition("/")
        if folder.startswith("memory://part-test/shards/parts/") and not folder.endswith("by-input"):
            by_part.setdefault(folder, []).append(name)
    assert len(by_part) >= 4 and all(names[-1] == "part.json" and len(names) > 3 for names in by_part.values())
    storage.remove("memory://part-test")


@pytest.mark.slow
def test_processes_write_to_an_object_store_what_they_write_to_a_disk(tmp_path, monkeypatch):
    store = object_store.ObjectStore()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    source = text_folder(tmp_path / "texts", 120)
    here = shard(source, tmp_path / "root", processes=1)
    store.start()
    try:
        root = f"s3://{object_store.BUCKET}/parts"
        there = shard(source, root, processes=2)
        assert there.dataset_digest == here.dataset_digest
        verify_shards(there.manifest_uri, there.manifest)
        (source / "part" / "later.txt").write_text("later")
        lines = []
        shard(source, root, processes=2, progress=lines.append)
        assert sum(not line.endswith("(was there)") for line in lines if line.startswith("part ")) in (1, 2)
    finally:
        store.stop()
