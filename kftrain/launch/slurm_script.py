"""The request of a job of Slurm as data: the command line of sbatch, and the batch script that it reads."""

from __future__ import annotations

import shlex
import sys
import zlib
from pathlib import Path

import jinja2

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import LaunchError
from kftrain.launch import slurm_queue
from kftrain.launch.base import Request
from kftrain.launch.slurm_settings import SlurmConfig
from kftrain.launch.spec import JobSpec
from kftrain.run.paths import RunPaths

GRACE_SECONDS = 30
"""Seconds that a node of another role has to end once it is told to stop: the default grace of a pod."""


def build_request(spec: JobSpec, config: Config) -> Request:
    """Build what submits the workers of a job. Raises LaunchError for a root that nodes cannot share."""
    require_shared_folder(spec.run_uri)
    command, script = build_command(spec, config.launch.slurm), build_script(spec, config)
    end = f"END_{storage.sha256_text(script)[:16]}"  # which the script cannot have as a line
    text = f"{shlex.join(command)} <<'{end}'\n{script}{end}\n"
    return Request({"command": command, "script": script}, text)


def build_command(spec: JobSpec, settings: SlurmConfig) -> list[str]:
    """Build the command line of sbatch."""
    values = {
        "--partition": settings.partition,
        "--account": settings.account,
        "--qos": settings.qos,
        "--constraint": settings.constraint,
        "--reservation": settings.reservation,
        "--gres": settings.gres,
        "--cpus-per-task": settings.cpus_per_node,
        "--gpus-per-node": settings.gpus_per_node,
        "--time": settings.time_limit_minutes,
    }
    resources = [f"{option}={value}" for option, value in values.items() if value]
    resources += ["--exclusive"] if settings.exclusive else []
    others = [  # with a comment of their own: they would have that of the first part, and look like jobs of ours
        (":", f"--comment={role.name}", f"--nodes={role.replicas}", "--ntasks-per-node=1", "--requeue", *resources)
        for role in spec.others
    ]
    return [
        *("sbatch", "--parsable", f"--job-name={RunPaths(spec.run_uri).run_id}-{spec.task}"),
        f"--comment={slurm_queue.make_comment(spec.run_uri, spec.task, spec.config_digest)}",
        # Relative to the folder: Slurm would replace a % in its path.
        *(f"--chdir={make_folder_path(spec.run_uri)}", f"--output={spec.task}-%j.log", "--open-mode=append"),
        *(f"--nodes={spec.workers.replicas}", "--ntasks-per-node=1", "--requeue"),
        f"--signal=B:TERM@{settings.commit_seconds}",
        *resources,
        *(option for part in others for option in part),
    ]


def build_script(spec: JobSpec, config: Config) -> str:
    """Build the batch script. No text of the configuration becomes shell in it."""
    settings = config.launch.slurm
    text = (Path(__file__).parent / "templates" / "slurm.sh.jinja").read_text()
    template = jinja2.Template(text, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    python = settings.python or ("python" if settings.container else sys.executable)
    options, prefix = _enter_container(settings, config.run.storage_root)
    start = [*prefix, python, "-m", "kftrain"]
    nodes = [
        (group, shlex.quote(f"s/^/[{role.name} {rank}] /"), rank, shlex.join([*start, *role.arguments]))
        for group, role in enumerate(spec.others, start=1)
        for rank in range(role.replicas)
    ]
    script: str = template.render(
        environment=[(name, shlex.quote(value)) for name, value in sorted(spec.environment.items())],
        modules=shlex.join(settings.modules),
        options=shlex.join(options),
        command=shlex.join([*start, *spec.workers.arguments]),
        nodes=nodes,
        parts=" ".join(f'"$SLURM_JOB_ID_HET_GROUP_{group}"' for group in range(1, len(spec.roles))),
        grace=GRACE_SECONDS,
        port=zlib.crc32(spec.run_uri.encode()) % 10_000,
        task=spec.task,
    )
    return script


def _enter_container(settings: SlurmConfig, root: str) -> tuple[list[str], list[str]]:
    """Return the options of srun, and the words before the worker's command, that put it into a container.

    The storage root is mounted where it is, as runs are named by their path.
    """
    path = str(storage.local_path(storage.absolute(root)))
    mounts = [f"{path}:{path}", *settings.container_mounts]
    if settings.container == "pyxis":
        return [f"--container-image={settings.container_image}", f"--container-mounts={','.join(mounts)}"], []
    if settings.container == "apptainer":
        gpus = ["--nv"] if settings.gpus_per_node else []
        binds = [part for mount in mounts for part in ("--bind", mount)]
        return [], ["apptainer", "exec", *gpus, *binds, settings.container_image]
    return [], []


def require_shared_folder(uri: str) -> None:
    """Raise LaunchError for an object store: Slurm's logs need a file system that all nodes share."""
    if not storage.is_local(uri):
        what = "jobs of Slurm write their logs to a file system that all nodes share"
        raise LaunchError(what, where="run.storage_root", value=uri, fix="set it to a path there")


def make_folder_path(run_uri: str) -> Path:
    """Return the folder of Slurm's own files about a run: logs, and the exit codes of scripts."""
    return storage.local_path(run_uri) / "slurm"
