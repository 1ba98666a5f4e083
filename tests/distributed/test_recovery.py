"""Training that is killed, stopped or damaged, against the oracle: the same training, uninterrupted."""

import json
import signal

import psutil
import pytest
from helpers import jobs

from kftrain import config
from kftrain.core import storage
from kftrain.run import attempts, commit

pytestmark = pytest.mark.slow

SCRIPTED = "task.kind=helpers.models.scripted_task:ScriptedTask"
"""The same training as the oracle's, which stands still where it is told to: who kills it there needs not be quick."""

BY_THE_CLOCK = ["checkpoint.interval_steps=20", "checkpoint.interval_seconds=3600", "checkpoint.asynchronous=false"]
BY_THE_CLOCK += ["checkpoint.keep_last=1", "checkpoint.keep_every=10"]


def start(paths, resolved, step, do="hang", processes=2):
    """A node whose training has taken this step, and stands still in the one after the next."""
    script = json.dumps({"step": step + 1, "do": do})
    process = jobs.start_worker(paths, resolved, processes=processes, SCRIPT=script)
    jobs.wait_for_line(process, f"step {step}/20")
    return process


@pytest.mark.parametrize("kill_after", [3, 8, 14])
def test_killed_at_any_step_and_resumed_gives_the_same_losses_bit_by_bit(tmp_path, two_processes, kill_after):
    paths, resolved = jobs.make_run(tmp_path, [SCRIPTED])
    process = start(paths, resolved, kill_after)
    jobs.kill_tree(process)
    assert not storage.exists(paths.complete)
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert jobs.losses(paths) == two_processes[1]
    assert attempts.find_last_attempt(paths) == 2


def test_checkpoints_by_the_clock_of_the_first_process_are_everyones_and_the_curve_is_the_same(tmp_path, two_processes):
    paths, resolved = jobs.make_run(tmp_path, [SCRIPTED, *BY_THE_CLOCK])
    script = {"clock": {"0": [6, 12], "1": [3, 9]}, "step": 15, "do": "hang"}
    process = jobs.start_worker(paths, resolved, SCRIPT=json.dumps(script))
    jobs.wait_for_line(process, "step 14/20")
    jobs.kill_tree(process)
    assert [name.step for name in commit.list_committed(paths)] == [13, 10]
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on after step 13" in done.stdout and jobs.losses(paths) == two_processes[1]
    assert [name.step for name in commit.list_committed(paths)] == [20, 10]


def test_sigterm_commits_the_very_step_and_ends_with_143(tmp_path, two_processes):
    paths, resolved = jobs.make_run(tmp_path, [SCRIPTED, "checkpoint.interval_steps=20", "train.steps=20"])
    process = start(paths, resolved, 7, "await_stop")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 143, output
    step = commit.find_last_step(paths)
    assert 7 <= step < 20
    assert f"stopped at step {step} of 20" in storage.read_json(paths.error)["line"]
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0
    assert f"going on after step {step}" in done.stdout
    assert jobs.losses(paths) == two_processes[1]


def test_resumed_on_another_number_of_processes_the_curve_stays_within_rounding(tmp_path, reference):
    paths, resolved = jobs.make_run(tmp_path, [SCRIPTED])
    process = start(paths, resolved, 12, processes=3)
    jobs.kill_tree(process)
    done = jobs.run_worker(paths, resolved, processes=1)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs.assert_same_curve(jobs.losses(paths), reference[1])


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, two_processes):
    paths, resolved = jobs.make_run(tmp_path, [SCRIPTED, "checkpoint.asynchronous=false"])
    process = start(paths, resolved, 13)
    jobs.kill_tree(process)
    newest = commit.list_committed(paths)[0]
    victim = storage.local_path(storage.join(paths.checkpoints, str(newest), "__1_0.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "__1_0.distcp: a file is damaged" in done.stdout
    assert f"going on after step {newest.step - 5}" in done.stdout
    assert jobs.losses(paths) == two_processes[1]


def test_a_checkpoint_of_another_training_is_refused(tmp_path, two_processes):
    paths, resolved = jobs.make_run(tmp_path, [SCRIPTED, "checkpoint.asynchronous=false"])
    process = start(paths, resolved, 7)
    jobs.kill_tree(process)
    paths, other = jobs.make_run(tmp_path, [SCRIPTED, "optimizer.learning_rate=0.1"])
    done = jobs.run_worker(paths, other)
    assert done.returncode == 12
    assert "optimizer.learning_rate: 0.003 -> 0.1" in storage.read_json(paths.error)["line"]
    assert attempts.find_last_attempt(paths) == 1  # it may be at work: the intruder has not claimed it


def test_a_complete_run_is_not_trained_again(two_processes):
    paths, _ = two_processes
    before = storage.read_bytes(paths.complete)
    resolved = config.parse(storage.read_text(paths.config))
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0
    assert "already complete" in done.stdout
    assert storage.read_bytes(paths.complete) == before


def test_one_killed_process_takes_the_others_down_and_the_code_is_retryable(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["train.steps=2000"])
    process = jobs.start_worker(paths, resolved)
    jobs.wait_for_line(process, "step 2/2000")
    ranks = jobs.ranks_of(process)
    assert len(ranks) == 2
    ranks[1].kill()
    process.communicate(timeout=600)
    assert process.returncode in (137, 138)
    assert storage.read_json(paths.error)["exit_code"] == process.returncode


def test_the_workers_die_with_the_supervisor(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["train.steps=2000"])
    process = jobs.start_worker(paths, resolved)
    jobs.wait_for_line(process, "step 2/2000")
    below = jobs.tree_of(process)[1:]
    process.kill()
    process.communicate(timeout=600)
    gone, alive = psutil.wait_procs(below, timeout=120)
    assert not alive and len(gone) >= 3
