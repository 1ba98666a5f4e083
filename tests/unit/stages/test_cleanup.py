import os
import time
from pathlib import Path
from typing import get_args

from kftrain import config
from kftrain.contracts import RunPaths
from kftrain.stages import cleanup


def test_only_what_nobody_has_touched_for_long_is_removed(tmp_path):
    run = tmp_path / "runs" / "r"
    for name in (".tmp-old", ".tmp-new", "checkpoints/.tmp-folder/x", "config.yaml"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    before = time.time() - cleanup.STALE_SECONDS - 10
    for name in (".tmp-old", "checkpoints/.tmp-folder", "config.yaml"):
        os.utime(run / name, (before, before))
    resolved = config.parse("", [f"run.storage_root={tmp_path}"])
    removed = cleanup.clean_up(resolved, RunPaths(str(run)))
    assert sorted(Path(path).name for path in removed) == [".tmp-folder", ".tmp-old"]
    assert sorted(path.name for path in run.iterdir()) == [".tmp-new", "checkpoints", "config.yaml"]


def test_a_remote_storage_root_is_left_alone():
    assert cleanup.remove_temporary_files(config.parse(""), RunPaths("memory://runs/r")) == []


def test_every_backend_has_a_cleaner():
    assert set(get_args(config.LaunchConfig.model_fields["backend"].annotation)) == cleanup.CLEANERS.keys()
