"""The backend `slurm` against a real Slurm: two nodes of this machine. Skips, with the reason, where there is none."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from helpers import jobs
from helpers.ports import Held
from launchers.slurm_cluster import SlurmCluster, explain_absence, explain_absence_of_accounting

from kftrain.core import storage
from kftrain.errors import LaunchError, OtherJobError
from kftrain.launch import scheduler
from kftrain.launch.base import build_launcher
from kftrain.launch.slurm_queue import list_jobs
from kftrain.launch.spec import Role, make_job
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.run.job_tasks import TRAINING

pytestmark = [
    pytest.mark.skipif(bool(explain_absence()), reason=explain_absence() or "there is one"),
    pytest.mark.timeout(900, func_only=True),
]

LAUNCH = """
import sys
import tempfile
from kftrain.core import storage
from kftrain import config
from kftrain.errors import KftrainError
from kftrain.launch.jobs import run_training
from kftrain.run.paths import RunPaths
paths = RunPaths(sys.argv[1])
try:
    run_training(paths, config.parse(storage.read_text(paths.config)))
except KftrainError as error:
    print(error.line, flush=True)
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster for the tests of this file."""
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


@pytest.fixture(autouse=True)
def environment(cluster, monkeypatch):
    """Commands of this process find the cluster; its jobs end with the test."""
    for name, value in {**cluster.environment, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(scheduler, "POLL_SECONDS", 0.3)
    yield
    cluster.run("scancel", "--user=root")
    wait_until(lambda: not cluster.run("squeue", "--noheader").strip())


@pytest.fixture
def make_run(tmp_path):
    """Makes a run on two nodes with one process each, and further settings."""

    def make(*overrides, run_id="r"):
        sizes = ["launch.backend=slurm", "launch.nodes=2", "launch.processes_per_node=1"]
        return jobs.make_run(tmp_path, [*sizes, *overrides], run_id)

    return make


class Launch:
    """A launcher in a process of its own."""

    def __init__(self, paths):
        self.paths = paths
        command = [sys.executable, "-c", LAUNCH, paths.uri]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self):
        """Waits for the end; returns exit code and output."""
        output, _ = self.process.communicate()
        return self.process.returncode, output


@pytest.fixture
def launch():
    """Starts launchers; none outlives the test."""
    started = []

    def start(paths):
        started.append(Launch(paths))
        return started[-1]

    yield start
    for one in started:
        with one.process:  # closes what its output came through
            one.process.kill()


def wait_until(is_so, seconds=math.inf):
    """Waits as long as the test may take: how long a machine needs is not what is tested, unless `seconds` say so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.2)


def read_output(paths):
    return "".join(path.read_text() for path in sorted(Path(paths.uri, "slurm").glob("*.log")))


def list_steps(paths):
    """The steps that workers have taken, in the order of their lines."""
    return [int(step) for step in re.findall(r"kftrain\| step (\d+)/", read_output(paths))]


def wait_for_step(paths, step):
    wait_until(lambda: step <= max(list_steps(paths), default=0))


def find_job(state="RUNNING"):
    """The only job in this state; None for none."""
    return next((job for job in list_jobs() if job.state == state), None)


def read_weights(paths):
    completion = documents.read(Completion, paths.complete)
    return storage.read_bytes(storage.join(completion.export_uri, "model.safetensors"))


def is_orphaned(paths):
    """Tell whether any process of a run's workers is left."""
    return bool(subprocess.run(["pgrep", "-f", f"run-uri {paths.uri}"], capture_output=True, check=False).stdout)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns the final weights of a run of so many steps that nothing happens to, of one machine without any Slurm."""
    weights = {}

    def train(steps, processes=2):
        if (steps, processes) not in weights:
            paths, resolved = jobs.make_run(tmp_path_factory.mktemp("undisturbed"), [f"train.steps={steps}"])
            done = jobs.run_worker(paths, resolved, processes=processes)
            assert done.returncode == 0, done.stdout + done.stderr
            weights[steps, processes] = read_weights(paths)
        return weights[steps, processes]

    return train


def test_two_nodes_train_to_completion_and_nobody_else_reads_what_they_print(make_run, undisturbed):
    paths, resolved = make_run()
    launcher = build_launcher(resolved)
    launcher.check()
    assert launcher.run(make_job(TRAINING, paths, resolved)) == 0
    assert read_weights(paths) == undisturbed(20)
    assert list_steps(paths) == list(range(1, 21))
    modes = [stat.S_IMODE(Path(paths.uri, folder).stat().st_mode) for folder in ("slurm", "logs")]
    assert modes == [0o700, 0o700]
    lines = []
    launcher.logs(paths.uri, "train", False, lines.append)
    assert lines == read_output(paths).splitlines()


def requeue_at_random(cluster, paths, launched, num_requeues, steps, seed):
    """Requeue a job, as a preemption does, at so many random moments of its life."""
    generator = random.Random(seed)
    for _ in range(num_requeues):
        wait_until(find_job)
        done = max(list_steps(paths), default=0)
        if generator.random() < 0.8:  # else while it starts
            wait_for_step(paths, min(done + generator.randint(1, max(1, steps // num_requeues)), steps - 2))
        time.sleep(generator.random())
        job = find_job()
        assert job is not None, "it has ended before all that was to happen"
        cluster.run("scontrol", "requeue", job.job_id)
        wait_until(lambda: find_job() is None)
    code, output = launched.finish()
    assert code == 0, output


def check_requeues(cluster, make_run, launch, undisturbed, num_requeues, steps):
    paths, _ = make_run(f"train.steps={steps}", "checkpoint.interval_steps=100000")
    requeue_at_random(cluster, paths, launch(paths), num_requeues, steps, seed=num_requeues)
    assert list_steps(paths) == list(range(1, steps + 1))
    assert f"restart {num_requeues}" in read_output(paths)
    assert read_weights(paths) == undisturbed(steps)


def test_two_requeues_lose_no_step(cluster, make_run, launch, undisturbed):
    check_requeues(cluster, make_run, launch, undisturbed, 2, steps=60)


@pytest.mark.slow
@pytest.mark.timeout(2400, func_only=True)
def test_twelve_requeues_lose_no_step(cluster, make_run, launch, undisturbed):
    check_requeues(cluster, make_run, launch, undisturbed, 12, steps=600)


def test_cancel_commits_and_leaves_no_process(make_run, launch):
    paths, resolved = make_run("train.steps=100000", "checkpoint.interval_steps=100000")
    launched = launch(paths)
    wait_for_step(paths, 3)
    (status,) = build_launcher(resolved).describe(paths.uri)
    assert (status.run, status.state, status.workers, status.reason) == ("r", "Training", "2/2", "")
    (name,) = build_launcher(resolved).cancel("r")
    assert name.startswith("r-train (job ")
    code, output = launched.finish()
    assert code == 13 and "somebody cancelled the job" in output
    last = max(list_steps(paths))
    assert storage.list_names(paths.checkpoints) == [f"step-{last:08d}-a1"]
    assert not is_orphaned(paths)
    with pytest.raises(LaunchError, match="no job in Slurm"):
        build_launcher(resolved).cancel("r")


def test_a_launcher_that_is_told_to_stop_takes_its_job_along(make_run, launch):
    paths, _ = make_run("train.steps=100000", "checkpoint.interval_steps=100000")
    launched = launch(paths)
    wait_for_step(paths, 3)
    launched.process.send_signal(signal.SIGTERM)
    code, output = launched.finish()
    assert code == 143, output
    assert storage.list_names(paths.checkpoints) == [f"step-{max(list_steps(paths)):08d}-a1"]
    assert find_job() is None and not is_orphaned(paths)


def test_a_killed_launcher_leaves_the_job_and_the_next_one_adopts_it(make_run, launch):
    paths, resolved = make_run("train.steps=150")
    first = launch(paths)
    wait_for_step(paths, 2)
    first.process.kill()
    other = resolved.model_copy(update={"run": resolved.run.model_copy(update={"seed": 5})})
    with pytest.raises(OtherJobError):
        build_launcher(other).run(make_job(TRAINING, paths, other))
    code, output = launch(paths).finish()
    assert code == 0, output
    assert len({job.job_id for job in list_jobs() if job.run_uri == paths.uri}) == 1


def test_suspend_commits_and_unsuspend_goes_on(make_run, launch, undisturbed):
    paths, resolved = make_run("train.steps=60", "checkpoint.interval_steps=100000")
    launched, launcher = launch(paths), build_launcher(resolved)
    wait_for_step(paths, 3)
    launcher.suspend(paths.uri)
    (status,) = launcher.describe(paths.uri)
    assert (status.state, status.workers) == ("Suspended", "0/2")
    (suspended_at,) = commit.list_committed(paths)  # by nothing but the order: the interval is never over
    assert status.progress in [f"step {step}/60" for step in range(3, suspended_at.step + 1)]  # not each is printed
    assert not is_orphaned(paths)
    launcher.unsuspend(paths.uri)
    assert launched.finish()[0] == 0
    assert list_steps(paths) == list(range(1, 61)) and read_weights(paths) == undisturbed(60)


def test_what_a_job_waits_for_is_said_in_slurms_words(cluster, make_run, launch):
    paths, resolved = make_run("launch.slurm.constraint=nothing")
    launcher = build_launcher(resolved)
    with pytest.raises(LaunchError, match="Invalid feature specification"):
        launcher.run(make_job(TRAINING, paths, resolved))
    quiet = ("--parsable", "--output=/dev/null")
    blocker = cluster.run("sbatch", *quiet, "--nodes=2", "--exclusive", "--wrap=sleep 600").strip()
    wait_until(lambda: "RUNNING" in cluster.run("squeue", "--noheader", f"--jobs={blocker}", "--format=%T"))
    paths, resolved = make_run(run_id="waits")
    launched = launch(paths)
    wait_until(lambda: build_launcher(resolved).describe(paths.uri))
    wait_until(lambda: build_launcher(resolved).describe(paths.uri)[0].reason == "Resources", 30)
    (status,) = build_launcher(resolved).describe(paths.uri)
    assert (status.state, status.workers) == ("Queued", "0/2")
    launched.process.send_signal(signal.SIGTERM)
    code, output = launched.finish()
    assert code == 143 and "waits: Resources" in output
    assert build_launcher(resolved).describe(paths.uri) == []


def test_the_controller_may_be_away(cluster, make_run, launch):
    paths, _ = make_run("train.steps=200")
    launched = launch(paths)
    wait_for_step(paths, 2)
    cluster.stop("slurmctld", signal.SIGKILL)
    time.sleep(5)
    cluster.start_controller()
    code, output = launched.finish()
    assert code == 0, output


def test_a_permanent_error_is_not_tried_again(make_run, launch):
    paths, _ = make_run("model.num_heads=3")
    code, output = launch(paths).finish()
    assert code == 10, output
    assert len([job for job in list_jobs() if job.run_uri == paths.uri]) == 1


def test_a_killed_worker_is_another_attempt(make_run, launch):
    paths, _ = make_run("train.steps=150")
    launched = launch(paths)
    wait_for_step(paths, 8)
    subprocess.run(["pkill", "-KILL", "-f", f"kftrain.worker.agent.*{paths.uri}"], check=True)
    code, output = launched.finish()
    assert code == 0, output
    assert "trying again from the last checkpoint" in output


def test_settings_become_what_slurm_shows(cluster, make_run):
    values = {"partition": "urgent", "account": "science", "constraint": "big", "time_limit_minutes": 30}
    values |= {"cpus_per_node": 3, "gpus_per_node": 2, "exclusive": "true", "reservation": "lab"}
    overrides = [f"launch.slurm.{name}={value}" for name, value in values.items()]
    paths, resolved = make_run(*overrides, "launch.nodes=1")
    cluster.run("scontrol", "create", "reservation=lab", "starttime=now", "duration=60", "users=root", "nodes=node1")
    try:
        request = build_launcher(resolved).build(make_job(TRAINING, paths, resolved))
        Path(paths.uri, "slurm").mkdir()
        command = [*request.content["command"], "--hold"]
        job_id = subprocess.run(command, input=request.content["script"], text=True, capture_output=True, check=True)
        shown = cluster.run("scontrol", "show", "job", job_id.stdout.strip())
    finally:
        cluster.run("scancel", "--user=root")
        wait_until(lambda: not cluster.run("squeue", "--noheader").strip())
        cluster.run("scontrol", "delete", "reservation=lab")
    for text in ("Partition=urgent", "Account=science", "Features=big", "TimeLimit=00:30:00", "Reservation=lab"):
        assert text in shown
    for text in ("OverSubscribe=NO", "CPUs/Task=3", "NumNodes=1", "Requeue=1", "JobName=r-train", "gpu:2"):
        assert text in shown


@pytest.mark.slow
@pytest.mark.timeout(1200, func_only=True)
def test_a_training_longer_than_the_time_limit_goes_on_by_itself(make_run, launch, undisturbed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    steps = 400  # of half a second: the limit is three minutes, however fast the machine
    settings = ["launch.slurm.partition=short", "launch.slurm.commit_seconds=60", "checkpoint.interval_steps=100000"]
    slow = ["task.kind=e2e.faulty.task:Faulty", "task.slow_seconds=0.5"]
    paths, _ = make_run(f"train.steps={steps}", *settings, *slow)
    assert launch(paths).finish()[0] == 0
    assert list_steps(paths) == list(range(1, steps + 1))
    assert "restart 1" in read_output(paths) and "DUE TO TIME LIMIT" not in read_output(paths)
    assert read_weights(paths) == undisturbed(steps)


@pytest.fixture
def forgetful(monkeypatch):
    """A cluster that forgets a job 5 s after its end, and has accounts of it."""
    reason = explain_absence_of_accounting()
    if reason:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        # A short path, below which sockets lie: with the name of the test in it Slurm could launch no job.
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-"))
        started = stack.enter_context(SlurmCluster(Path(short, "s"), forget_seconds=5, accounting=True))
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        yield started


def test_a_job_that_was_cancelled_while_nobody_looked_is_not_tried_again(forgetful, make_run, launch):
    paths, _ = make_run("train.steps=100000")
    launched = launch(paths)
    wait_for_step(paths, 3)
    launched.process.send_signal(signal.SIGSTOP)  # a laptop that sleeps
    job_id = find_job().job_id
    forgetful.run("scancel", job_id)
    wait_until(lambda: not forgetful.run("squeue", "--noheader", "--states=all").strip())
    launched.process.send_signal(signal.SIGCONT)
    code, output = launched.finish()
    assert code == 13 and "somebody cancelled the job" in output, output
    numbers = forgetful.run("sacct", "--allocations", "--noheader", "--parsable2", "--format=JobIDRaw").split()
    assert numbers == [job_id], "another attempt was made"


SSHD = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/me.pub
PidFile none
UsePAM no
StrictModes no
SetEnv {environment}
"""

SSH_CONFIG = """\
Host login1
HostName 127.0.0.1
Port {port}
IdentityFile {folder}/me
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
GlobalKnownHostsFile none
"""


@pytest.fixture
def login(cluster, tmp_path, monkeypatch):
    """A login node `login1` for ssh: a real sshd of this machine. This process itself finds no cluster any more."""
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("no sshd here: apt-get install openssh-server")
    folder, held = tmp_path / "ssh", Held()
    folder.mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd itself demands it
    for name in ("host", "me"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    variables = " ".join(f"{name}={value}" for name, value in {**cluster.environment, "OMP_NUM_THREADS": "1"}.items())
    (folder / "sshd").write_text(SSHD.format(port=held.number, folder=folder, environment=variables))
    (folder / "known").write_text(f"[127.0.0.1]:{held.number} {(folder / 'host.pub').read_text()}")
    (folder / "config").write_text(SSH_CONFIG.format(port=held.number, folder=folder))
    (folder / "programs").mkdir()
    ssh = folder / "programs" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/config "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{Path(sys.executable).parent}:/bin")
    for name in cluster.environment:
        monkeypatch.delenv(name)
    sshd = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", folder / "sshd"], stderr=subprocess.DEVNULL)
    wait_until(lambda: subprocess.run([ssh, "login1", "true"], capture_output=True, check=False).returncode == 0)
    yield folder
    sshd.terminate()
    sshd.wait()
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)


def test_a_launcher_elsewhere_works_through_ssh(login, make_run, launch, undisturbed):
    by_ssh = ["launch.slurm.host=login1", f"launch.slurm.python={sys.executable}"]
    paths, resolved = make_run("train.steps=60", *by_ssh)
    build_launcher(resolved).check()
    launched = launch(paths)
    wait_for_step(paths, 3)
    (status,) = build_launcher(resolved).describe(paths.uri)
    assert (status.state, status.workers) == ("Training", "2/2")
    launched.process.kill()
    code, output = launch(paths).finish()
    assert code == 0 and "is there already: following it" in output, output
    assert read_weights(paths) == undisturbed(60)
    paths, resolved = make_run("train.steps=100000", *by_ssh, run_id="cancelled")
    launched = launch(paths)
    wait_for_step(paths, 3)
    build_launcher(resolved).cancel(paths.uri)
    assert launched.finish()[0] == 13 and not is_orphaned(paths)
    (login / "me.pub").write_text("")
    with pytest.raises(LaunchError, match=r"login1: .*Permission denied"):
        build_launcher(resolved).check()


SERVER = """#!/bin/bash
[ "$3" = server ] || exec {python} "$@"
trap 'echo stopped; exit' INT
echo "serves as $KFTRAIN_NODE_RANK beside $KFTRAIN_MASTER_ADDRESS"
until [ -e "$4" ]; do sleep 0.1; done
exit 11
"""
"""Stands for Python: a server serves until it is told to stop, and fails once a file is there."""


@pytest.fixture
def make_served_run(make_run, tmp_path):
    """Makes a run of one node of workers, and a job with a server beside it; the server fails once `fails` is there."""
    python = tmp_path / "python"
    python.write_text(SERVER.format(python=sys.executable))
    python.chmod(0o755)

    def make(*overrides):
        paths, resolved = make_run("launch.nodes=1", f"launch.slurm.python={python}", *overrides)
        spec = make_job(TRAINING, paths, resolved)
        server = Role("server", 1, 1, ("server", str(tmp_path / "fails")))
        return paths, resolved, dataclasses.replace(spec, roles=(*spec.roles, server))

    return make


def do_when(is_so, action):
    """Do something beside the test as soon as something is so."""
    thread = threading.Thread(target=lambda: (wait_until(is_so), action()))
    thread.start()
    return thread


def test_a_server_works_beside_the_workers_until_they_are_done(make_served_run, undisturbed):
    paths, resolved, spec = make_served_run()
    assert build_launcher(resolved).run(spec) == 0
    assert read_weights(paths) == undisturbed(20, processes=1)
    lines = read_output(paths).splitlines()
    assert "[server 0] serves as 0 beside 127.0.0.1" in lines and "[server 0] stopped" in lines
    assert not is_orphaned(paths)


def test_a_server_that_fails_ends_the_workers_after_a_commit(make_served_run, tmp_path):
    paths, resolved, spec = make_served_run("train.steps=100000", "checkpoint.interval_steps=100000")
    thread = do_when(lambda: list_steps(paths)[3:], (tmp_path / "fails").touch)
    with pytest.raises(LaunchError, match="failed outside of its workers"):
        build_launcher(resolved).run(spec)
    thread.join()
    assert Path(paths.uri, "slurm", f"train-{list_jobs()[-1].job_id}.code").read_text() == "11\n"
    assert storage.list_names(paths.checkpoints) == [f"step-{max(list_steps(paths)):08d}-a1"]
    assert not is_orphaned(paths)


def test_a_job_with_a_server_is_requeued_as_a_whole_and_cancelled_as_a_whole(cluster, make_served_run):
    paths, resolved, spec = make_served_run("train.steps=100000", "checkpoint.interval_steps=100000")
    launcher = build_launcher(resolved)

    def requeue_and_cancel():
        cluster.run("scontrol", "requeue", find_job().job_id)
        wait_until(lambda: "step" in read_output(paths).partition("going on after step")[2])
        launcher.cancel(paths.uri)

    thread = do_when(lambda: list_steps(paths)[3:], requeue_and_cancel)
    with pytest.raises(LaunchError, match="somebody cancelled the job"):
        launcher.run(spec)
    thread.join()
    steps = list_steps(paths)
    assert steps == list(range(1, steps[-1] + 1)), "a step was lost"
    assert storage.list_names(paths.checkpoints)[-1].startswith(f"step-{steps[-1]:08d}")
    assert "[server 0] stopped" in read_output(paths).partition("restart 1")[2]
    assert not is_orphaned(paths)
    wait_until(lambda: not cluster.run("squeue", "--noheader").strip())
