import os
import shutil
import time
from pathlib import Path

from kftrain.launch import local
from kftrain.run.paths import RunPaths


def test_only_what_nobody_has_touched_for_long_is_removed(tmp_path):
    run = tmp_path / "runs" / "r"
    for name in (".tmp-old", ".tmp-new", "checkpoints/.tmp-folder/x", "config.yaml"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    before = time.time() - local.STALE_SECONDS - 10
    for name in (".tmp-old", "checkpoints/.tmp-folder", "config.yaml"):
        os.utime(run / name, (before, before))
    removed = local.remove_temporary_files(RunPaths(str(run)))
    assert sorted(Path(path).name for path in removed) == [".tmp-folder", ".tmp-old"]
    assert sorted(path.name for path in run.iterdir()) == [".tmp-new", "checkpoints", "config.yaml"]


def test_what_vanishes_meanwhile_is_no_failure_of_the_clean_up(tmp_path, monkeypatch):
    """Another process finishes what it writes, or deletes its folder, between two looks."""
    run = tmp_path / "runs" / "r"
    before = time.time() - local.STALE_SECONDS - 10
    for name in (".tmp-a", "b/.tmp-b", "c/.tmp-c", "c/d/.tmp-d"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
        os.utime(run / name, (before, before))
    (run / "link").symlink_to(run / "gone")
    stat = Path.stat

    def racing(path, **options):
        if path.name == ".tmp-a":
            path.unlink(missing_ok=True)
            shutil.rmtree(run / "c", ignore_errors=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", racing)
    assert local.remove_temporary_files(RunPaths(str(run))) == [str(run / "b" / ".tmp-b")]


def test_a_remote_storage_root_is_left_alone():
    assert local.remove_temporary_files(RunPaths("memory://runs/r")) == []
