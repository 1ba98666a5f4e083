"""`kftrain run` of a training that overfits: the best checkpoint is what is evaluated, registered and gated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import jobs
from helpers.models import overfitting

from kftrain.core import storage
from kftrain.run import documents
from kftrain.run.documents import Completion, Registration
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.slow

SETTINGS = ["checkpoint.keep_best=mse", "train.stop_after_no_improvement=4", "evaluate.interval_steps=10"]


def kftrain(folder, *arguments):
    command = [sys.executable, "-m", "kftrain", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.TESTS)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.timeout(1800)
def test_the_champion_is_the_best_checkpoint_and_every_page_says_why(tmp_path):
    (tmp_path / "c.yaml").write_text(overfitting.TEXT)
    overrides = [part for setting in [*SETTINGS, "registry.min_groups=2"] for part in ("--set", setting)]
    done = kftrain(tmp_path, "run", "--config", "c.yaml", *overrides)
    assert done.returncode == 0, done.stderr
    paths = RunPaths(str(next((tmp_path / "runs").iterdir())))
    completion, registered = (
        documents.read(Completion, paths.complete),
        documents.read(Registration, paths.registration),
    )
    history = storage.read_json(paths.history)
    errors = {point["step"]: point["validation/mse"] for point in history if "validation/mse" in point}
    assert completion.step == min(errors, key=errors.get) < completion.trained_steps < 120
    assert registered.promoted and registered.challenger.value == pytest.approx(min(errors.values()), rel=1e-9)
    line = completion.explain_choice(120)
    assert line.endswith("stopped after 4 evaluations without improvement")
    listed = kftrain(tmp_path, "runs", str(tmp_path))
    assert line in done.stdout and line in listed.stdout
    report = Path(storage.local_path(paths.report)).read_text()
    assert line.removeprefix("best") in report
