"""`train.command` in the jobs of two nodes that the backends make: each node's command runs here, as it would there."""

import os
import random
import subprocess
import sys

import pytest
from helpers import jobs
from test_foreign_trainers import make_run

from kftrain.core import storage
from kftrain.launch.base import build_launcher
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.launch.spec import PORT_ENV, make_job
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.run.job_tasks import TRAINING

ON_KUBERNETES = [
    "launch.backend=pytorchjob",
    "launch.kubernetes.trainer_image=image",
    "launch.kubernetes.volumes=[{name: shared, persistentVolumeClaim: {claimName: runs}}]",
    "tracking.uri=http://nowhere.invalid",
]
TWO_NODES = ["launch.nodes=2", "launch.processes_per_node=1", "launch.timeout_seconds=60"]

SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
export SLURM_LAUNCH_NODE_IPADDR=127.0.0.1
SLURM_PROCID=1 "$@" & SLURM_PROCID=0 "$@"; code=$?
wait %1 && exit "$code"
"""
"""srun for two nodes that are both here."""


def run_pods(paths, resolved, folder):
    """Runs the containers of the PyTorchJob; returns whether all ended well, and what they printed."""
    job = KIND.build(make_job(TRAINING, paths, resolved), resolved)
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = template["template"]["spec"]["containers"]
    assert template["replicas"] == 2
    port = str(random.randrange(20000, 30000))
    workers = []
    for index in range(2):
        variables = {entry["name"]: entry.get("value", str(index)) for entry in container["env"]}
        assert variables["KFTRAIN_MASTER_ADDRESS"].endswith("-worker-0")
        variables |= {"KFTRAIN_MASTER_ADDRESS": "127.0.0.1", PORT_ENV: port}
        command = [sys.executable, "-m", *container["command"]]
        environment = jobs.worker_environment(variables)
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    return all(worker.returncode == 0 for worker in workers), "".join(outputs)


def run_batch_script(paths, resolved, folder):
    """Runs Slurm's batch script, with an srun of ours."""
    commands = folder / "commands"
    if not commands.exists():
        commands.mkdir()
        for name, text in {"srun": SRUN, "squeue": "#!/bin/bash\necho RUNNING\n"}.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_JOB_ID": str(random.randrange(10000)), "SLURM_JOB_NODELIST": "n[0-1]", "PATH": path}
    script = build_launcher(resolved).build(make_job(TRAINING, paths, resolved)).content["script"]
    done = subprocess.run(
        ["bash"],
        input=script,
        cwd=commands,
        env=jobs.worker_environment(slurm),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("run_job", "overrides"),
    [
        (run_pods, ON_KUBERNETES),
        (run_batch_script, ["launch.backend=slurm"]),
    ],
)
def test_two_nodes_run_the_script_fail_together_and_go_on_from_a_commit_of_both(tmp_path, run_job, overrides):
    paths, resolved = make_run(tmp_path, "--fault", "killed in commit", overrides=[*TWO_NODES, *overrides])
    went_well, output = run_job(paths, resolved, tmp_path)
    assert not went_well, output
    (name,) = commit.list_committed(paths)
    manifest, _ = commit.read_checkpoint_manifest(storage.join(paths.checkpoints, str(name)))
    assert name.step == 3 and sum("node-" in file for file in manifest.files) == 2
    went_well, output = run_job(paths, resolved, tmp_path)
    assert went_well, output
    assert "attempt 2" in output and "going on after step 3" in output
    completion = documents.read(Completion, paths.complete)
    assert (completion.step, completion.world_size, completion.attempt) == (8, 2, 2)
    assert list(jobs.losses(paths)) == list(range(1, 9))
