"""Training as the launcher starts it, against the oracle: one process, uninterrupted."""

import json
import math
import signal

import psutil
import pytest
from helpers import jobs

from kftrain import attempts, config, contracts, storage
from kftrain.checkpoint import commit
from kftrain.contracts import Completion

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The oracle: one process, never interrupted."""
    paths, resolved = jobs.make_run(tmp_path_factory.mktemp("reference"))
    done = jobs.run_worker(paths, resolved, processes=1)
    assert done.returncode == 0, done.stdout + done.stderr
    return paths, jobs.losses(paths)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    paths, resolved = jobs.make_run(tmp_path_factory.mktemp("two"))
    done = jobs.run_worker(paths, resolved, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return paths, jobs.losses(paths)


def assert_same_curve(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys() == set(range(1, 21))
    for step, loss in theirs.items():
        assert math.isclose(ours[step], loss, rel_tol=tolerance), (step, ours[step], loss)


def test_the_loss_falls(reference):
    _, losses = reference
    assert losses[20] < 0.8 * losses[1]


def test_two_processes_with_fsdp_give_the_curve_of_one(reference, two_processes):
    assert_same_curve(two_processes[1], reference[1])


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (2, ["parallel.strategy=ddp"]),
        (3, []),  # 8 samples over 3 processes: uneven shares
        (2, ["train.micro_batch_size=1"]),
        (2, ["parallel.strategy=ddp", "train.micro_batch_size=3", "train.activation_checkpointing=blocks"]),
        (4, ["parallel.replicate=2", "parallel.reshard_after_forward=false"]),
    ],
)
def test_any_layout_gives_the_curve_of_one_process(tmp_path, reference, processes, overrides):
    paths, resolved = jobs.make_run(tmp_path, overrides)
    done = jobs.run_worker(paths, resolved, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_curve(jobs.losses(paths), reference[1])


def test_completion_states_what_was_reached(two_processes):
    paths, losses = two_processes
    completion = contracts.read(Completion, paths.complete)
    assert (completion.step, completion.samples_consumed, completion.world_size, completion.attempt) == (20, 160, 2, 1)
    assert completion.metrics["loss"] == losses[20]
    manifest, digest = commit.read_manifest(completion.checkpoint_uri)
    assert digest == completion.checkpoint_digest
    commit.verify_files(completion.checkpoint_uri, manifest.files)
    assert 1 <= len(commit.committed(paths)) <= 2


@pytest.mark.parametrize("kill_after", [3, 8, 14])
def test_killed_at_any_step_and_resumed_gives_the_same_losses_bit_by_bit(tmp_path, two_processes, kill_after):
    paths, resolved = jobs.make_run(tmp_path)
    process = jobs.start_worker(paths, resolved)
    jobs.wait_for_line(process, f"step {kill_after}/20")
    jobs.kill_tree(process)
    assert not storage.exists(paths.complete)
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert jobs.losses(paths) == two_processes[1]
    assert attempts.last_attempt(paths) == 2


def test_sigterm_commits_the_very_step_and_ends_with_143(tmp_path, two_processes):
    paths, resolved = jobs.make_run(tmp_path, ["checkpoint.interval_steps=20", "train.steps=20"])
    process = jobs.start_worker(paths, resolved)
    jobs.wait_for_line(process, "step 7/20")
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    step = commit.last_step(paths)
    assert 7 <= step < 20
    assert f"stopped at step {step} of 20" in storage.read_json(paths.error)["line"]
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0
    assert f"going on after step {step}" in done.stdout
    assert jobs.losses(paths) == two_processes[1]


def test_resumed_on_another_number_of_processes_the_curve_stays_within_rounding(tmp_path, reference):
    paths, resolved = jobs.make_run(tmp_path)
    process = jobs.start_worker(paths, resolved, processes=3)
    jobs.wait_for_line(process, "step 12/20")
    jobs.kill_tree(process)
    done = jobs.run_worker(paths, resolved, processes=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_curve(jobs.losses(paths), reference[1])


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, two_processes):
    paths, resolved = jobs.make_run(tmp_path, ["checkpoint.asynchronous=false"])
    process = jobs.start_worker(paths, resolved)
    jobs.wait_for_line(process, "step 13/20")
    jobs.kill_tree(process)
    newest = commit.committed(paths)[0]
    victim = storage.local_path(storage.join(paths.checkpoints, str(newest), "__1_0.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "__1_0.distcp: a file is damaged" in done.stderr
    assert f"going on after step {newest.step - 5}" in done.stdout
    assert jobs.losses(paths) == two_processes[1]


def test_a_checkpoint_of_another_training_is_refused(tmp_path, two_processes):
    paths, resolved = jobs.make_run(tmp_path, ["checkpoint.asynchronous=false"])
    process = jobs.start_worker(paths, resolved)
    jobs.wait_for_line(process, "step 7/20")
    jobs.kill_tree(process)
    paths, other = jobs.make_run(tmp_path, ["optimizer.learning_rate=0.1"])
    done = jobs.run_worker(paths, other)
    assert done.returncode == 12
    assert "optimizer.learning_rate: 0.003 -> 0.1" in storage.read_json(paths.error)["line"]


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
    process.communicate(timeout=60)
    assert process.returncode in (137, 138)
    assert storage.read_json(paths.error)["exit_code"] == process.returncode


def test_the_workers_die_with_the_supervisor(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["train.steps=2000"])
    process = jobs.start_worker(paths, resolved)
    jobs.wait_for_line(process, "step 2/2000")
    below = jobs.tree_of(process)[1:]
    process.kill()
    process.communicate(timeout=60)
    gone, alive = psutil.wait_procs(below, timeout=10)
    assert not alive and len(gone) >= 3


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["optimizer.learning_rate=1e30", "train.gradient_clip_norm=0"])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 19
    assert "lower optimizer.learning_rate" in storage.read_json(paths.error)["line"]


@pytest.mark.parametrize(
    ("overrides", "processes", "code", "message"),
    [
        (["train.global_batch_size=2"], 3, 10, "3"),
        (["parallel.shard=2"], 3, 10, "parallel.replicate x parallel.shard"),
        (["model.num_heads=5"], 1, 10, "num_heads"),
    ],
)
def test_a_layout_that_cannot_be_is_a_config_error(tmp_path, overrides, processes, code, message):
    paths, resolved = jobs.make_run(tmp_path, overrides)
    done = jobs.run_worker(paths, resolved, processes=processes)
    assert done.returncode == code, done.stdout + done.stderr
    assert message in storage.read_json(paths.error)["line"]
    assert not storage.exists(paths.complete)
    assert commit.committed(paths) == []


def test_a_torn_shard_is_found_before_the_first_step(tmp_path):
    paths, resolved = jobs.make_run(tmp_path)
    manifest_uri = storage.read_json(paths.shards)["manifest_uri"]
    shard = next(storage.local_path(manifest_uri).parent.glob("train-*.tar"))
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1024])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 11
    assert shard.name in storage.read_json(paths.error)["line"]
    assert attempts.last_attempt(paths) == 0


def test_bf16_trains_and_says_so(tmp_path, reference):
    paths, resolved = jobs.make_run(tmp_path, ["precision.compute=bf16"])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = jobs.losses(paths)[20], reference[1][20]
    assert ours != theirs and math.isclose(ours, theirs, rel_tol=0.05)


def test_the_history_of_a_run_is_json_that_a_report_can_read(two_processes):
    history = json.loads(storage.read_text(two_processes[0].history))
    assert [point["step"] for point in history] == list(range(1, 21))
    assert {"loss", "learning_rate", "gradient_norm", "samples_per_second", "seconds"} <= history[0].keys()
