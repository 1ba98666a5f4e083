"""The promises of every launcher, kept by real processes: what is asked of one backend is asked of all."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time

import pytest
from e2e.commands import kftrain, options, running
from e2e.faulty.task import PERMANENT
from e2e.namespace import wait_until
from helpers.jobs import losses

from kftrain import config
from kftrain.errors import LaunchError
from kftrain.launch.base import build_launcher
from kftrain.launch.spec import Role, make_job
from kftrain.run import attempts
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.timeout(600, func_only=True)

STEPS = 40
COMMITTED = "checkpoint at step 10 committed"
FAULTY = {"task.kind": "faulty.task:Faulty", "task.tokenizer": "bytes", "train.steps": STEPS}
SLOW = {**FAULTY, "task.slow_seconds": 0.5}
"""Leaves some 20 s to do something to a job."""


def prepare(site, changes, folder):
    """A run of the site whose data is there."""
    pairs = {**site.settings, "launch.nodes": site.nodes, **changes}
    return kftrain("shard", *options(pairs), folder=folder)["run_uri"]


@contextlib.contextmanager
def training(site, folder, changes=SLOW, until=COMMITTED):
    """The URI of a new run of the site and the command that trains it, as soon as it says `until`."""
    run_uri = prepare(site, changes, folder)
    with running("train", run_uri, folder=folder) as command:
        command.wait_for(until, seconds=360)  # a cluster of Ray alone takes a minute and more on a busy machine
        yield run_uri, command


def ask_refused(verb, site, run_uri, folder):
    """What a verb of `kftrain` says that is refused for a job at work."""
    with running(verb, run_uri, *site.where, folder=folder) as command:
        command.finish(code=13)
    return command.output


def see(site, run_uri, *arguments):
    """What `kftrain status` says of a run, by somebody who knows only its id."""
    command = [sys.executable, "-m", "kftrain", "status", run_uri, *site.where, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def assert_nothing_is_left(site, run_uri):
    wait_until(lambda: not site.list_left(run_uri), 60, "the end of what the job was")


def assert_every_step_was_taken(run_uri, num_attempts):
    assert sorted(losses(RunPaths(run_uri))) == list(range(1, STEPS + 1))
    assert attempts.find_last_attempt(RunPaths(run_uri)) == num_attempts


@pytest.mark.promise("trains")
def test_it_trains(site, promise, tmp_path):
    run_uri = prepare(site, FAULTY, tmp_path)
    result = kftrain("train", run_uri, folder=tmp_path)
    assert result["step"] == STEPS
    assert_every_step_was_taken(run_uri, 1)
    assert_nothing_is_left(site, run_uri)


@pytest.mark.promise("request")
def test_the_request_that_is_shown_is_taken(site, promise, tmp_path):
    command = [sys.executable, "-m", "kftrain", "run", *options({**site.settings, "launch.nodes": site.nodes})]
    shown = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True, cwd=tmp_path)
    site.check_request(shown.stdout)


@pytest.mark.promise("found")
def test_anybody_sees_it(site, promise, tmp_path):
    with training(site, tmp_path) as (run_uri, command):
        (job,) = see(site, run_uri)
        command.finish()
    assert (job["task"], job["state"]) == ("train", "Training")
    assert job["workers"] in (f"{site.nodes}/{site.nodes}", "")
    assert f"/{STEPS}" in job["progress"] or site.nodes == 1


@pytest.mark.promise("waits")
@pytest.mark.parametrize("case", ["image", "node", "claim", "namespace"])
def test_why_it_waits_is_said(case, site, promise, tmp_path):
    changes, words, seconds = site.waiting[case] if case in site.waiting else pytest.skip(f"no such case: {case}")
    changes = {**FAULTY, **changes, "launch.kubernetes.start_timeout_seconds": 15}
    with training(site, tmp_path, changes, until=site.started) as (run_uri, command):
        start = time.monotonic()
        command.wait_for(words, 60)
        assert time.monotonic() - start < seconds
        if site.waits_for_ever:
            kftrain("cancel", run_uri, *site.where, folder=tmp_path)
        command.finish(code=13, seconds=120)
    assert_nothing_is_left(site, run_uri)


@pytest.mark.promise("logs")
def test_logs_go_on_through_a_replaced_worker(site, promise, expect_refusal, tmp_path):
    with training(site, tmp_path) as (run_uri, command):
        if promise in site.refused:
            expect_refusal(ask_refused("logs", site, run_uri, tmp_path))
            command.finish()
            return
        with running("logs", run_uri, "-f", *site.where, folder=tmp_path) as logs:
            logs.wait_for("step 1/")
            site.kill_worker(run_uri, rank=site.nodes - 1)
            logs.wait_for("attempt 2", 300)
            logs.wait_for(f"step {STEPS}/{STEPS}", 200)
            command.finish()
            logs.finish(seconds=120)  # who has not seen that it succeeded waits a minute for another attempt


@pytest.mark.promise("cancel")
def test_cancel_commits_and_leaves_nothing(site, promise, tmp_path):
    with training(site, tmp_path, {**SLOW, "train.steps": 400}) as (run_uri, command):
        kftrain("cancel", run_uri, *site.where, folder=tmp_path)
        assert not site.list_alive(run_uri), "cancel returned before the last process had ended"
        assert command.process.wait(60) in (13, 143)
    assert losses(RunPaths(run_uri)), "what was trained is committed"
    assert_nothing_is_left(site, run_uri)


@pytest.mark.promise("suspend")
def test_suspended_it_goes_on_where_it_was(site, promise, expect_refusal, tmp_path):
    with training(site, tmp_path) as (run_uri, command):
        if promise in site.refused:
            expect_refusal(ask_refused("suspend", site, run_uri, tmp_path))
            command.finish()
            return
        kftrain("suspend", run_uri, *site.where, folder=tmp_path)
        command.wait_for(site.suspended)
        wait_until(lambda: not site.list_alive(run_uri), 60, "the end of the workers")
        kftrain("unsuspend", run_uri, *site.where, folder=tmp_path)
        command.finish()
    assert "going on after step" in command.output
    assert_every_step_was_taken(run_uri, 2)


@pytest.mark.promise("adopted")
def test_the_next_launcher_adopts_the_job(site, promise, tmp_path):
    with training(site, tmp_path) as (run_uri, first):
        first.kill()
    with running("train", run_uri, folder=tmp_path) as second:
        second.wait_for("is there already: following it")
        second.finish()
    assert_every_step_was_taken(run_uri, 1)
    assert_nothing_is_left(site, run_uri)


@pytest.mark.promise("two launchers")
def test_of_two_launchers_one_runs_the_job(site, promise, tmp_path):
    slower = {**SLOW, "task.slow_seconds": 1.5}  # the second one must be there before the end
    with training(site, tmp_path, slower) as (run_uri, first), running("train", run_uri, folder=tmp_path) as second:
        codes = sorted([first.process.wait(300), second.process.wait(300)])
    assert codes == [0, 17], first.output + second.output
    assert_every_step_was_taken(run_uri, attempts.find_last_attempt(RunPaths(run_uri)))
    assert_nothing_is_left(site, run_uri)


@pytest.mark.promise("worker killed")
def test_a_killed_worker_costs_one_attempt(site, promise, tmp_path):
    with training(site, tmp_path) as (run_uri, command):
        site.kill_worker(run_uri, rank=site.nodes - 1)
        command.finish()
    assert "going on after step" in command.output
    assert_every_step_was_taken(run_uri, 2)
    assert_nothing_is_left(site, run_uri)


@pytest.mark.promise("preempted")
def test_a_worker_that_is_told_to_go_commits(site, promise, tmp_path):
    with training(site, tmp_path) as (run_uri, command):
        time.sleep(3)  # of 0.5 s a step
        site.stop_worker(run_uri)
        command.finish()
    (line,) = [line for line in command.lines if "going on after step" in line]
    assert int(line.split("going on after step")[1].split()[0].strip(":,")) > 10, "it committed no step of its own"
    assert_every_step_was_taken(run_uri, 2)


RETRYABLE = {"task.fault": "retryable", "task.at_call": 2, "launch.max_restarts_without_progress": 1}


@pytest.mark.parametrize(
    ("changes", "code", "words", "num_attempts"),
    [
        pytest.param({"task.fault": "raise"}, 16, "the model is not right", 1, marks=pytest.mark.promise("user error")),
        pytest.param({"task.fault": "diverge"}, 19, "", 1, marks=pytest.mark.promise("diverged")),
        pytest.param(RETRYABLE, 13, "a passing fault", 2, marks=pytest.mark.promise("retries end")),
    ],
    ids=["user-error", "diverged", "retries-end"],
)
def test_a_failure_ends_it(site, promise, changes, code, words, num_attempts, tmp_path):
    run_uri = prepare(site, {**FAULTY, **changes}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.finish(code=code)
    assert words in command.output
    assert attempts.find_last_attempt(RunPaths(run_uri)) == num_attempts
    assert_nothing_is_left(site, run_uri)


@pytest.mark.parametrize("kind", PERMANENT, ids=lambda kind: str(kind.exit_code))
def test_every_permanent_exit_code_arrives(site, kind, tmp_path):
    """16 and 19 have promises of their own, with two nodes; 17 and 18 are said of launchers, not of workers."""
    run_uri = prepare(site, {**FAULTY, "task.fault": kind.__name__, "task.at_call": 2, "launch.nodes": 1}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.finish(code=kind.exit_code)
    assert "a fault for good" in command.output
    assert attempts.find_last_attempt(RunPaths(run_uri)) == 1


@pytest.mark.promise("servers")
def test_a_role_of_servers_runs_or_is_refused(site, promise, expect_refusal):
    pairs = [f"{key}={value}" for key, value in site.settings.items()]
    resolved = config.parse("", pairs)
    spec = make_job(TRAINING, RunPaths.of(resolved.run.storage_root, "r"), resolved)
    both = dataclasses.replace(spec, roles=(*spec.roles, Role("server", 1, 1, ("server",))))
    launcher = build_launcher(resolved)
    if promise not in site.refused:
        assert "server" in launcher.build(both).text  # test_slurm_cluster.py and tests/unit/launch run them
        return
    with pytest.raises(LaunchError) as caught:
        launcher.build(both)
    expect_refusal(caught.value.line)


@pytest.mark.promise("storage away")
def test_an_outage_of_storage_costs_no_attempt(site, promise, request, tmp_path):
    store = site.store or request.getfixturevalue("store")
    with training(site, tmp_path) as (run_uri, command):
        store.pause()
        try:
            time.sleep(20)
        finally:
            store.go_on()
        command.finish()
    assert_every_step_was_taken(run_uri, 1)


@pytest.mark.promise("garbage")
def test_gc_takes_what_nobody_follows(site, promise, tmp_path):
    with training(site, tmp_path, {**SLOW, "train.steps": 400}) as (run_uri, command):
        command.kill()
    if site.dies_with_launcher:
        assert_nothing_is_left(site, run_uri)
        return
    kftrain("gc", *site.where, folder=tmp_path)
    assert site.list_alive(run_uri), "a laptop that sleeps for a while loses its job"
    site.age_last_look(run_uri, days=8)
    kftrain("gc", *site.where, folder=tmp_path)
    assert_nothing_is_left(site, run_uri)


@pytest.mark.promise("controller away")
def test_nobody_works_on_the_job_for_two_minutes(site, promise, disturb, tmp_path):
    with training(site, tmp_path, {**SLOW, "task.slow_seconds": 2.0}) as (run_uri, command):
        with site.disturb_controller():
            time.sleep(120)
        command.finish()
    assert_every_step_was_taken(run_uri, 1)
    assert_nothing_is_left(site, run_uri)


@pytest.mark.promise("node lost")
@pytest.mark.timeout(1200, func_only=True)
def test_a_node_dies(site, promise, disturb, tmp_path):
    slower = {**SLOW, "task.slow_seconds": 2.0, "launch.timeout_seconds": 60}  # other backends come to it by then
    slower |= site.small
    with training(site, tmp_path, slower) as (run_uri, command):
        site.lose_node(run_uri, site.nodes - 1, disturb)
        command.finish(seconds=900)
    assert "going on after step" in command.output
    assert_every_step_was_taken(run_uri, attempts.find_last_attempt(RunPaths(run_uri)))
