"""`kftrain run` from raw data to a champion, with a failure in the middle: the program as people start it."""

import os
import subprocess
import sys

import pytest
from helpers.documents import DIGITS

from kftrain.core import storage
from kftrain.run import documents
from kftrain.run.documents import Registration
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.slow

SMALL = ["--set", "launch.processes_per_node=2", "--set", "checkpoint.interval_steps=10"]


def kftrain(folder, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "kftrain", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.timeout(1800)
def test_a_run_that_fails_at_its_last_step_is_resumed_without_training_again(tmp_path):
    (tmp_path / "c.yaml").write_text(DIGITS)
    wrong = ["--set", "registry.metric=accurracy", "--set", "registry.goal=maximize"]
    failed = kftrain(tmp_path, "run", "--config", "c.yaml", *SMALL, *wrong)
    assert failed.returncode == 10, failed.stderr
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("kftrain: error: registry.metric") and "accurracy" in last

    run = next((tmp_path / "runs").iterdir())
    paths = RunPaths(str(run))
    assert storage.read_json(paths.error)["stage"] == "register"
    assert "accurracy" in (run / "failure.html").read_text()
    assert f"--resume {run}" in failed.stderr

    resumed = kftrain(tmp_path, "run", "--resume", str(run), "--set", "registry.metric=accuracy")
    assert resumed.returncode == 0, resumed.stderr
    assert "was already trained" in resumed.stderr
    assert f"run {run.name} is complete" in resumed.stdout and "tiny version 1, champion" in resumed.stdout
    assert documents.read(Registration, paths.registration).promoted
    assert storage.read_json_if_exists(paths.error) is None
    assert "<html" in storage.read_text(paths.report)
    assert not list(tmp_path.glob("runs/*/**/.tmp-*"))
