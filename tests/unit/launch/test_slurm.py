"""The batch script as data, run in bash with commands of ours, and lines that squeue prints; without any Slurm."""

import json
import shlex
import subprocess
from contextlib import nullcontext
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


def run_script(script, folder, programs=COMMANDS, **environment):
    """Run a batch script with commands of ours; return srun's arguments and environment, and the completed process."""
    commands, seen = folder / "commands", folder / "seen"
    if not commands.exists():
        commands.mkdir()
        for name, text in programs.items():
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


def test_every_setting_is_an_option_of_sbatch():
    values = {"account": "a b", "qos": "long", "constraint": "x&y", "reservation": "r", "gres": "nvme:1"}
    pairs = [f"launch.slurm.{key}={value}" for key, value in values.items()]
    command = build(make_spec(), *pairs, "launch.slurm.cpus_per_node=4", "launch.slurm.exclusive=true").content[
        "command"
    ]
    assert {f"--{key}={value}" for key, value in values.items()} <= set(command)
    assert {"--cpus-per-task=4", "--exclusive"} <= set(command)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HOSTILE.filter(str.isprintable).filter(lambda text: text.strip(" -") == text != ""))
def test_modules_are_loaded_before_the_workers_start(tmp_path, text):
    commands = {**COMMANDS, "module": """printf '%s\\0' "$@" > "$SEEN.modules"; exit ${MODULES:-0}"""}
    script = build(make_spec(), f"launch.slurm.modules={json.dumps(['cuda/12.4', text], ensure_ascii=False)}").content[
        "script"
    ]
    run_script(script, tmp_path, commands)
    assert (tmp_path / "seen.modules").read_text().split("\0") == ["load", "cuda/12.4", text, ""]
    (tmp_path / "seen").write_text("")
    *_, done = run_script(script, tmp_path, commands, MODULES="1")
    assert done.returncode == 1 and not (tmp_path / "seen").read_text(), "without its modules no worker may start"


IMAGE = "registry.example#team/trainer:1 $(touch PWNED)"
WORKER = ["python", "-m", "kftrain", "worker", "--task", "train"]
ROOT = "/shared/kftrain:/shared/kftrain"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("pyxis", [f"--container-image={IMAGE}", f"--container-mounts={ROOT},/data:/data:ro"], WORKER),
        (
            "apptainer",
            [],
            ["apptainer", "exec", "--nv", "--bind", ROOT, "--bind", "/data:/data:ro", IMAGE, *WORKER],
        ),
    ],
)
def test_workers_run_in_a_container_that_has_the_storage_root(tmp_path, kind, options, words):
    pairs = {"container": kind, "container_image": IMAGE, "container_mounts": ["/data:/data:ro"], "python": ""}
    request = build(make_spec(), *(f"launch.slurm.{key}={json.dumps(value)}" for key, value in pairs.items()))
    arguments, *_ = run_script(request.content["script"], tmp_path)
    shell = arguments.index("bash")
    assert arguments[:shell] == ["--ntasks-per-node=1", "--kill-on-bad-exit=0", *options]
    assert arguments[shell + 3 :] == ["worker", *words]


def test_a_cluster_without_pyxis_is_refused(tmp_path, monkeypatch):
    for name in slurm_queue.COMMANDS:
        (tmp_path / name).write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    pairs = ["launch.backend=slurm", "launch.slurm.container=pyxis", "launch.slurm.container_image=x"]
    launcher = build_launcher(config.parse("", [*pairs, f"run.storage_root={tmp_path}"]))
    for words, expectation in (
        ("", pytest.raises(LaunchError, match="no pyxis")),
        ("--container-image", nullcontext()),
    ):
        (tmp_path / "srun").write_text(f"#!/bin/sh\necho ' {words}=IMAGE'\n")
        for name in (*slurm_queue.COMMANDS, "srun"):
            (tmp_path / name).chmod(0o755)
        with expectation:
            launcher.check()


def test_half_a_container_is_refused():
    for pair in ("container=pyxis", "container_image=x.sif", "container_mounts=[/data:/data]"):
        with pytest.raises(ConfigError, match="set together"):
            build(make_spec(), f"launch.slurm.{pair}")


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
