"""Slurm's own commands, and the jobs of kftrain that they list. A job's comment says which run it works on."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kftrain.core.progress import STEP, strip_mark
from kftrain.errors import LaunchError
from kftrain.launch.scheduler import ScheduledJob, SchedulerAwayError, parse_mark
from kftrain.run.paths import RunPaths

COMMANDS = ("sbatch", "squeue", "scontrol", "scancel")

COMMAND_SECONDS = 60.0
"""Seconds that one of them may take; they themselves ride out short absences of slurmctld."""

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
SSH_FAILED = 255
"""Exit code of ssh where it has not run the command."""

PROGRESS_BYTES = 64 << 10
"""Length of the end of a log in which the last step is looked for."""

ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""States of a job that will not run again."""

HELD = ("JobHeld", "requeued in held state", "requeued held")
"""Words of the reasons of a job that waits until somebody releases it."""

TIMES = {"SLURM_TIME_FORMAT": "%s"}
"""Variables of Slurm's commands: times are seconds since the epoch."""

FORMAT = "%A|%T|%r|%u|%D|%V|%k"

AWAY = ("Unable to contact", "Socket timed out", "Connection refused", "Connection timed out")
"""Words of commands that did not reach slurmctld."""

NO_ANSWER = "Unexpected message received"
"""Words of `scontrol hold` and `release` that did not reach it: they take no answer for one that they do not know."""

SHUT_OUT = ("Permission denied", "Host key verification failed", "Could not resolve hostname")
"""Words of ssh where another try would fail, too."""


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
        return self.state == "PENDING" and any(words in self.reason for words in HELD)


def make_comment(run_uri: str, task: str, digest: str) -> str:
    """Write the comment of a job, in printable ASCII."""
    return json.dumps({"kftrain": 1, "run": run_uri, "task": task, "digest": digest})


def require_commands(host: str = "") -> None:
    """Raise LaunchError where Slurm's commands, or ssh to the host that has them, are not installed."""
    missing = [name for name in (SSH[:1] if host else COMMANDS) if shutil.which(name) is None]
    if missing:
        raise LaunchError(
            f"this machine has no {', '.join(missing)}",
            where="launch.backend",
            value="slurm",
            fix="install ssh" if host else "launch on a login node, or name one that ssh reaches by launch.slurm.host",
        )


def ask_slurm(command: Sequence[str], text: str = "", host: str = "") -> str:
    """Run one of Slurm's commands, by ssh where there is a host, with `text` as its input; return its output.

    Raises LaunchError with Slurm's or ssh's own words, as SchedulerAwayError where slurmctld or the host is away.
    """
    require_commands(host)
    # An allocation that the launcher itself runs in must not set options of its jobs.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SBATCH_", "SLURM_", "SQUEUE_"))}
    conf = {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}
    environment = {**kept, **conf, **TIMES}
    if host:  # a shell there reads the command
        times = (f"{name}={value}" for name, value in TIMES.items())
        command = [*SSH, "--", host, shlex.join(["env", *times, *command])]
    try:
        done = subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SchedulerAwayError(f"{command[0]} does not answer", where=host or "slurm") from None
    except FileNotFoundError:
        raise LaunchError(f"this machine has no {command[0]}", where="slurm") from None
    if done.returncode:
        words = "; ".join(line for line in done.stderr.splitlines() if line.strip()) or f"exit code {done.returncode}"
        words = f"slurmctld does not answer: {words}" if NO_ANSWER in words else words
        is_away = any(part in words for part in (*AWAY, NO_ANSWER))
        if host and done.returncode == SSH_FAILED:
            is_away = not any(part in words for part in SHUT_OUT)
        raise (SchedulerAwayError if is_away else LaunchError)(words, where=host or "slurm")
    return done.stdout


def list_jobs(mine: bool = False, host: str = "") -> list[SlurmJob]:
    """List kftrain's jobs, those that have just ended too, the newest last; `mine`: those of this user."""
    command = ["squeue", "--noheader", "--states=all", f"--format={FORMAT}"]
    output = ask_slurm([*command, "--me"] if mine else command, host=host)
    jobs = [job for line in output.splitlines() if (job := parse_job(line)) is not None]
    return sorted(jobs, key=lambda job: int(job.job_id))


def parse_job(line: str) -> SlurmJob | None:
    """Parse a line of squeue in `FORMAT`; None for a job of somebody else's."""
    fields = line.split("|", 6)
    try:
        job_id, state, reason, user, num_nodes, submitted_at, comment = fields
        job = SlurmJob(
            **parse_mark(json.loads(comment)),
            job_id=str(int(job_id)),
            state=state,
            reason=reason if state == "PENDING" and reason != "None" else "",
            user=user,
            num_nodes=int(num_nodes),
            submitted_at=float(submitted_at),
        )
        return job if job.run_uri.startswith("/") else None
    except (ValueError, TypeError, KeyError):
        return None


def read_past_state(job_id: str, host: str = "") -> str:
    """Return the state of a job that squeue has forgotten; empty where the cluster keeps no accounts, or not of it."""
    command = ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}", "--format=JobIDRaw,State"]
    try:
        output = ask_slurm(command, host=host)
    except SchedulerAwayError:
        raise
    except LaunchError:
        return ""
    states = dict(line.split("|", 1) for line in output.splitlines() if "|" in line)
    return states.get(job_id, "").partition(" ")[0]  # `CANCELLED by 1000`


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


def tell_job(job: SlurmJob, signal_name: str, wait_command: list[str], host: str = "") -> None:
    """Tell the script of a job that runs, by a signal, and Slurm of a job that waits, what the job is to do."""
    running = ["scancel", "--batch", f"--signal={signal_name}"]
    try:
        ask_slurm([*(wait_command if job.state == "PENDING" else running), job.job_id], host=host)
    except LaunchError as error:  # it has changed since the look; but somebody else's job stays as it is
        if "ermission" in error.line or "Invalid user id" in error.line:
            raise
