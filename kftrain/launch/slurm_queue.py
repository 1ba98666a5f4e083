"""Slurm's own commands, and the jobs of kftrain that they list. A job's comment says which run it works on."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kftrain.core.progress import STEP, strip_mark
from kftrain.errors import LaunchError, OtherJobError
from kftrain.launch.scheduler import ScheduledJob, SchedulerAwayError
from kftrain.run.job_tasks import JOB_TASKS
from kftrain.run.paths import RunPaths

LOCK_TURNS = 3
"""Times that a launcher asks for the lock of its job."""

COMMANDS = ("sbatch", "squeue", "scontrol", "scancel")

COMMAND_SECONDS = 60.0
"""Seconds that one of them may take; they themselves ride out short absences of slurmctld."""

PROGRESS_BYTES = 64 << 10
"""Length of the end of a log in which the last step is looked for."""

ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""States of a job that will not run again."""

HELD = frozenset(("JobHeldUser", "JobHeldAdmin", "job requeued in held state"))
"""Reasons of a job that waits until somebody releases it."""

FORMAT = "%A|%T|%r|%u|%D|%V|%k"

AWAY = (
    "Unable to contact",
    "Socket timed out",
    "Connection refused",
    "Connection timed out",
)
"""Words of commands that did not reach slurmctld."""


@dataclass(frozen=True)
class SlurmJob(ScheduledJob):
    """A job of kftrain as squeue lists it."""

    ended_states = ENDED
    cancelled_state = "CANCELLED"

    user: str

    @property
    def title(self) -> str:
        """Name of the job for people."""
        return f"{RunPaths(self.run_uri).run_id}-{self.task} (job {self.job_id})"

    @property
    def is_held(self) -> bool:
        """True if it waits until somebody releases it."""
        return self.state == "PENDING" and self.reason in HELD


def make_comment(run_uri: str, task: str, digest: str) -> str:
    """Write the comment of a job, in printable ASCII."""
    return json.dumps({"kftrain": 1, "run": run_uri, "task": task, "digest": digest})


def require_commands() -> None:
    """Raise LaunchError where Slurm's commands are not installed."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        raise LaunchError(
            f"this machine has no {', '.join(missing)}",
            where="launch.backend",
            value="slurm",
            fix="launch on a login node of the cluster; a step of a Kubeflow pipeline has pods, no Slurm",
        )


def ask_slurm(command: Sequence[str], text: str = "") -> str:
    """Run one of Slurm's commands, with `text` as its input; return its output.

    Raises LaunchError with Slurm's own words, as SchedulerAwayError where slurmctld cannot be reached.
    """
    require_commands()
    # An allocation that the launcher itself runs in must not set options of its jobs.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SBATCH_", "SLURM_", "SQUEUE_"))}
    conf = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
    environment = {**kept, **conf, "SLURM_TIME_FORMAT": "%s"}
    try:
        done = subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SchedulerAwayError(f"{command[0]} does not answer", where="slurm") from None
    if done.returncode:
        words = "; ".join(line for line in done.stderr.splitlines() if line.strip()) or f"exit code {done.returncode}"
        kind = SchedulerAwayError if any(part in words for part in AWAY) else LaunchError
        raise kind(words, where="slurm")
    return done.stdout


def list_jobs(mine: bool = False) -> list[SlurmJob]:
    """List kftrain's jobs, those that have just ended too, the newest last; `mine`: those of this user."""
    command = ["squeue", "--noheader", "--states=all", f"--format={FORMAT}"]
    output = ask_slurm([*command, f"--user={getpass.getuser()}"] if mine else command)
    jobs = [job for line in output.splitlines() if (job := parse_job(line)) is not None]
    return sorted(jobs, key=lambda job: int(job.job_id))


def parse_job(line: str) -> SlurmJob | None:
    """Parse a line of squeue in `FORMAT`; None for a job of somebody else's."""
    fields = line.split("|", 6)
    try:
        job_id, state, reason, user, num_nodes, submitted_at, comment = fields
        document = json.loads(comment)
        run_uri, task, digest = (str(document[name]) for name in ("run", "task", "digest"))
        # It is shown on terminals, and its folder is read.
        if document["kftrain"] != 1 or not (run_uri.startswith("/") and run_uri.isprintable() and task in JOB_TASKS):
            return None
        waits = reason if state == "PENDING" and reason != "None" else ""
        return SlurmJob(
            job_id=str(int(job_id)),
            state=state,
            reason=waits,
            user=user,
            num_nodes=int(num_nodes),
            submitted_at=float(submitted_at),
            run_uri=run_uri,
            task=task,
            digest=digest,
        )
    except (ValueError, TypeError, KeyError):  # anybody may write any comment
        return None


class LogLines:
    """The lines of a job's log, as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_bytes = 0

    def read(self) -> list[str]:
        """Return the whole lines that were added since the last call; none while the file is not there."""
        with contextlib.suppress(OSError), self.path.open("rb") as stream:
            stream.seek(self._num_bytes)
            content = stream.read()
            content = content[: content.rfind(b"\n") + 1]
            self._num_bytes += len(content)
            return content.decode(errors="replace").splitlines()
        return []


def read_progress(path: Path) -> str:
    """Return the last step that a job's log names, such as `step 12/40`; empty where none can be read."""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - PROGRESS_BYTES))
        texts = (strip_mark(line) or "" for line in reversed(stream.read().decode(errors="replace").splitlines()))
        return next((match[0] for text in texts if (match := STEP.search(text))), "")
    return ""


def tell_job(job: SlurmJob, signal_name: str, wait_command: list[str]) -> None:
    """Tell the script of a job that runs, by a signal, and Slurm of a job that waits, what the job is to do."""
    running = ["scancel", "--batch", f"--signal={signal_name}"]
    try:
        ask_slurm([*(wait_command if job.state == "PENDING" else running), job.job_id])
    except LaunchError as error:  # it has changed since the look; but somebody else's job stays as it is
        if "ermission" in error.line:
            raise


@contextlib.contextmanager
def hold_job(path: Path, run_uri: str) -> Iterator[None]:
    """Be the only launcher of a job during the block. Raises OtherJobError, with who is, where another one works.

    A lock, which ends with its process. Where a file system has none, two may follow a job; it is one job all the same.
    """
    with path.open("a+") as stream:
        for turn in range(LOCK_TURNS):  # somebody may just be looking whether it is held
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if turn == LOCK_TURNS - 1:
                    stream.seek(0)
                    fix = "kftrain logs -f shows what it prints; kftrain cancel ends the job"
                    raise OtherJobError(
                        "another launcher follows this job", where=run_uri, value=stream.read(200).strip(), fix=fix
                    ) from None
                time.sleep(0.2)
            except OSError:
                break
            else:
                break
        stream.truncate(0)
        stream.write(f"process {os.getpid()} of {getpass.getuser()} on {socket.gethostname()}\n")
        stream.flush()
        yield


def is_held(path: Path) -> bool:
    """Tell whether a launcher works on the job of this file."""
    with contextlib.suppress(OSError), path.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
