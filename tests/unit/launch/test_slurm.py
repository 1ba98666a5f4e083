"""The batch script as data, run in bash with commands of ours, and lines that squeue prints; without any Slurm."""

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kftrain import config
from kftrain.errors import ConfigError, LaunchError
from kftrain.launch import slurm_queue
from kftrain.launch.base import build_launcher
from kftrain.launch.spec import JobSpec, Role, make_job
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths

GOLDEN = Path(__file__).parents[2] / "golden" / "slurm.sh"

SETTINGS = [
    "launch.backend=slurm",
    "launch.slurm.python=/shared/venv/bin/python",
    "launch.slurm.partition=gpu",
    "launch.slurm.gpus_per_node=8",
    "launch.slurm.time_limit_minutes=240",
]

COMMANDS = {
    "srun": """printf '%s\\0' "$@" > "$SEEN"; env -0 > "$SEEN.environment"; exit ${CODE:-0}""",
    "squeue": "echo RUNNING",
    "scontrol": 'echo "$*" >> "$SEEN.asked"',
}
"""Commands of ours: srun writes what it was given, as arguments and as environment, and ends with the code CODE."""


def make_spec(arguments=("worker", "--task", "train"), environment=None, run_uri="/shared/kftrain/runs/r"):
    return JobSpec("train", run_uri, "d" * 64, (Role("worker", 2, 8, tuple(arguments)),), environment or {})


def build(spec, *overrides):
    resolved = config.parse("", ["run.storage_root=/shared/kftrain", *SETTINGS, *overrides])
    return build_launcher(resolved).build(spec)


def run_script(script, folder, **environment):
    """Run a batch script with commands of ours; return srun's arguments and environment, and the completed process."""
    commands, seen = folder / "commands", folder / "seen"
    if not commands.exists():
        commands.mkdir()
        for name, text in COMMANDS.items():
            (commands / name).write_text(f"#!/bin/bash\n{text}\n")
            (commands / name).chmod(0o755)
    variables = {"SEEN": str(seen), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", **environment}
    done = subprocess.run(
        ["bash"],
        input=script,
        cwd=folder,
        env={**variables, "PATH": f"{commands}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    arguments, lines = (path.read_bytes().decode().split("\0")[:-1] for path in (seen, folder / "seen.environment"))
    return arguments, dict(line.split("=", 1) for line in lines), done


def test_the_request_is_the_one_that_was_reviewed():
    spec = make_spec(environment={"NCCL_DEBUG": "INFO", "NOTE": 'it\'s "here"; $(reboot)'})
    text = build(spec).text
    assert text == GOLDEN.read_text()


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30)
HOSTILE = st.one_of(
    TEXT, st.sampled_from(["$(touch PWNED)", "`touch PWNED`", "';touch PWNED;'", "\nEND_OF_JOB\n", "-x", "a\\"])
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=HOSTILE, argument=HOSTILE, name=HOSTILE)
def test_no_text_becomes_shell(tmp_path, value, argument, name):
    spec = make_spec(("worker", argument), {"VALUE": value, "OTHER": name}, f"/shared/kftrain/runs/r{name}")
    request = build(spec)
    arguments, environment, done = run_script(request.content["script"], tmp_path)
    assert (environment["VALUE"], environment["OTHER"]) == (value, name)
    assert arguments[-2:] == ["worker", argument] and done.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"commands", "seen", "seen.environment", "train-7.code"}
    assert shlex.split(request.text.partition(" <<'END_")[0]) == request.content["command"]
    comment = next(part for part in request.content["command"] if part.startswith("--comment="))
    assert comment.isascii() and comment.isprintable()
    assert (
        "\n".join(request.content["script"].splitlines()).count("#SBATCH") == 0 or "#SBATCH" in value + argument + name
    )


@pytest.mark.parametrize("code", [0, 16, 143])
def test_the_script_ends_with_the_workers_code_and_leaves_it(tmp_path, code):
    *_, done = run_script(build(make_spec()).content["script"], tmp_path, CODE=str(code))
    assert done.returncode == code and (tmp_path / "train-7.code").read_text() == f"{code}\n"
    assert (tmp_path / "train-7.code").stat().st_mode & 0o077 == 0
    assert not (tmp_path / "seen.asked").exists()


def test_what_cannot_be_run_is_refused(monkeypatch):
    with pytest.raises(LaunchError, match=r"workers alone \(got 'server'\)"):
        build(replace(make_spec(), roles=(*make_spec().roles, Role("server", 1, 1, ("server",)))))
    with pytest.raises(LaunchError, match=r"run.storage_root: .* file system that all nodes share"):
        build(make_spec(run_uri="s3://bucket/runs/r"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match=r"this machine has no sbatch, squeue, scontrol, scancel.*login node"):
        build_launcher(config.parse("launch: {backend: slurm}")).check()
    with pytest.raises(ConfigError, match="cannot be printed"):
        config.parse("", ['launch.slurm.partition="a\\nb"'])
    with pytest.raises(ConfigError, match="SLURM_JOB_ID"):
        config.parse("launch: {environment: {SLURM_JOB_ID: '7'}}")


def test_gpus_of_a_node_say_how_many_processes_it_has():
    resolved = config.parse("", [*SETTINGS, "run.storage_root=/shared", "launch.nodes=4"])
    workers = make_job(TRAINING, RunPaths.of("/shared", "r"), resolved).workers
    assert (workers.replicas, workers.processes_per_node) == (4, 8)


SQUEUE_22_05 = """\
3|PENDING|Resources|alice|2|1795762800|{"kftrain": 1, "run": "/shared/runs/a|b", "task": "train", "digest": "d"}
2|RUNNING|None|bob|4|1795762700|{"kftrain": 1, "run": "/shared/runs/c", "task": "evaluate", "digest": "e"}
1|PENDING|JobHeldUser|bob|1|1795762600|(null)
4|RUNNING|None|eve|1|1795762600|{"kftrain": 1, "run": ["x"], "digest": "d"}
5|RUNNING|None|eve|1|1795762600|{"kftrain": 2, "run": "/x", "task": "train", "digest": "d"}
6|RUNNING|None|eve|1|1795762600|{"kftrain": 1, "run": "/x\\u001b[2J", "task": "train", "digest": "d"}
7|RUNNING|None|eve|1|1795762600|{"kftrain": 1, "run": "s3://eve/x", "task": "train", "digest": "d"}
8|RUNNING|None|eve|1|1795762600|{"kftrain": 1, "run": "/x", "task": "mine", "digest": "d"}
9|PENDING|job requeued in held state|bob|1|1795762600|{"kftrain": 1, "run": "/x", "task": "train", "digest": "d"}
"""
"""As squeue of 22.05 prints it, the only version that these tests have met."""


def test_jobs_of_others_are_not_taken_for_ours():
    first, second, suspended = (job for line in SQUEUE_22_05.splitlines() if (job := slurm_queue.parse_job(line)))
    assert (first.job_id, first.run_uri, first.reason, first.num_nodes) == ("3", "/shared/runs/a|b", "Resources", 2)
    assert (second.state, second.reason, second.user, second.submitted_at) == ("RUNNING", "", "bob", 1795762700.0)
    assert not first.is_held and not first.has_ended and suspended.is_held
