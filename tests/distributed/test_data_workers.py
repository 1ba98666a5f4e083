"""Trainings whose samples are decoded: by threads, by processes, and by processes that die."""

import json
import re

import pytest
from helpers import jobs

from kftrain.core import storage
from kftrain.run import commit, documents
from kftrain.run.documents import Completion

pytestmark = pytest.mark.slow

AUGMENTING = "task.kind=helpers.models.decoding_task:Augmenting"
PROCESSES = ("data.worker_kind=processes", "data.workers=2")


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(jobs.TESTS))
    return lambda run_id, *overrides: jobs.make_run(
        tmp_path, [AUGMENTING, "checkpoint.asynchronous=false", *overrides], run_id
    )


@pytest.fixture
def expected(make):
    """The curve of a training whose two processes decode in one thread each."""
    paths, resolved = make("threads", "data.workers=0")
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    return jobs.losses(paths)


def test_fault_11_a_data_worker_that_the_kernel_kills_is_retryable_and_named_and_the_resumed_curve_is_exact(
    make, expected, tmp_path
):
    paths, resolved = make("killed", *PROCESSES)
    script = json.dumps({"row": 28, "do": "kill", "mark": str(tmp_path / "mark")})
    done = jobs.run_worker(paths, resolved, DECODE_SCRIPT=script)
    error = storage.read_json(paths.error)
    assert done.returncode == error["exit_code"] == 138, done.stdout + done.stderr
    assert "data.workers: data worker" in error["line"] and "was killed by SIGKILL" in error["line"]
    assert error["failure_class"] == "out of memory on the host"
    again = jobs.run_worker(paths, resolved, DECODE_SCRIPT=script)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on after step" in again.stdout
    assert jobs.losses(paths) == expected


def test_fault_9_a_bad_sample_in_a_data_worker_ends_the_run_with_shard_and_key(make, tmp_path):
    paths, resolved = make("refused", *PROCESSES)
    script = json.dumps({"row": 5, "do": "refuse", "mark": str(tmp_path / "mark")})
    done = jobs.run_worker(paths, resolved, DECODE_SCRIPT=script)
    error = storage.read_json(paths.error)
    assert done.returncode == error["exit_code"] == 11, done.stdout + done.stderr
    assert re.search(r"/train-00000\d\.tar, block-\d+: task\.decode: scripted", error["line"])


def test_samples_that_are_left_out_are_the_same_on_one_process_and_on_two_and_after_a_resume(make):
    """On whichever process and worker they come; one budget less is one too few."""
    script = json.dumps({"bad_modulus": 13})
    curves, left_out = {}, {}
    for name, processes, overrides in (("one", 1, ["data.workers=0"]), ("two", 2, ["data.workers=2"])):
        paths, resolved = make(name, "data.max_bad_samples=100", *overrides)
        done = jobs.run_worker(paths, resolved, processes=processes, DECODE_SCRIPT=script)
        assert done.returncode == 0, done.stdout + done.stderr
        curves[name] = jobs.losses(paths)
        newest = storage.join(paths.checkpoints, str(commit.list_committed(paths)[0]))
        left_out[name] = commit.read_checkpoint_manifest(newest)[0].bad_samples
        assert done.stdout.count("warning: left out") == len(left_out[name])
        assert documents.read(Completion, paths.complete).metrics["bad_samples"] == len(left_out[name])
    assert left_out["one"] == left_out["two"] and len(left_out["one"]) > 2
    assert curves["one"] == pytest.approx(curves["two"], rel=1e-5)
    budget = f"data.max_bad_samples={len(left_out['one']) - 1}"
    paths, resolved = make("less", budget, *PROCESSES)
    done = jobs.run_worker(paths, resolved, DECODE_SCRIPT=script)
    assert done.returncode == 11, done.stdout + done.stderr
    assert "one more than may be left out" in storage.read_json(paths.error)["line"]
    again = jobs.run_worker(paths, resolved, DECODE_SCRIPT=script)
    assert again.returncode == 11 and "going on after step" in again.stdout, "what was left out before still counts"
    more = resolved.model_copy(update={"data": resolved.data.model_copy(update={"max_bad_samples": 100})})
    storage.publish(paths.config, more.to_yaml())
    last = jobs.run_worker(paths, more, DECODE_SCRIPT=script)
    assert last.returncode == 0, last.stdout + last.stderr
    assert jobs.losses(paths) == curves["two"]
