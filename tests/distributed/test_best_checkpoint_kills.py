"""The best checkpoint and early stopping on two processes that are killed, against a training that was not."""

import json
from pathlib import Path

import pytest
from helpers import jobs
from helpers.models import overfitting

from kftrain.core import storage
from kftrain.run import attempts, commit, documents
from kftrain.run.documents import Completion

pytestmark = pytest.mark.slow

EARLY = ["checkpoint.keep_best=mse", "train.stop_after_no_improvement=3", "train.log_interval_steps=1"]


def completion_of(paths):
    found = documents.read(Completion, paths.complete)
    content = (Path(storage.local_path(found.export_uri)) / "model.safetensors").read_bytes()
    return (found.step, found.trained_steps, found.selection), content


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    paths, resolved = jobs.prepare(tmp_path_factory.mktemp("whole"), overfitting.TEXT, EARLY)
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped after 3 evaluations without improvement" in done.stdout
    (step, trained, _), _ = found = completion_of(paths)
    assert trained == step + 30 < 120 and {name.step for name in commit.list_committed(paths)} == {trained, step}
    return found


@pytest.mark.parametrize(
    ("line", "hold"),
    [
        ("step 12/120", {"step": 13}),
        ("step 31/120", {"step": 32}),
        ("step 55/120", {"step": 56}),
        ("without improvement", {"export": True}),
    ],
)
def test_killed_at_any_moment_it_comes_to_the_same_best_one_and_the_same_end(tmp_path, expected, line, hold):
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, EARLY)
    process = jobs.start_worker(paths, resolved, HOLD=json.dumps(hold))
    jobs.wait_for_line(process, line)
    jobs.kill_tree(process)
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert completion_of(paths) == expected
    assert attempts.find_last_attempt(paths) == 2
    again = jobs.run_worker(paths, resolved)
    assert again.returncode == 0 and "already complete" in again.stdout


def test_another_number_of_processes_goes_on_to_the_same_step(tmp_path, expected):
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, EARLY)
    process = jobs.start_worker(paths, resolved, processes=3, HOLD=json.dumps({"step": 36}))
    jobs.wait_for_line(process, "step 35/120")
    jobs.kill_tree(process)
    done = jobs.run_worker(paths, resolved, processes=1)
    assert done.returncode == 0, done.stdout + done.stderr
    (step, trained, selection), _ = completion_of(paths)
    assert (step, trained) == expected[0][:2]
    assert selection.value == pytest.approx(expected[0][2].value, rel=1e-5)
