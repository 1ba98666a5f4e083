"""The protocol of a launcher: what starts a job and sees it to its end, and what is done with jobs that are there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from kftrain.config import Config
from kftrain.core.progress import Progress, to_log
from kftrain.errors import LaunchError
from kftrain.launch.backends import BACKENDS
from kftrain.launch.spec import JobSpec
from kftrain.run.paths import RunPaths


@dataclass(frozen=True)
class Request:
    """The thing that a launcher would start, as data."""

    content: dict[str, Any]
    """The document for an API server, or the command and its environment."""
    text: str
    """The same as kubectl or a shell takes it, with a newline at its end."""


@dataclass(frozen=True)
class JobStatus:
    """The status of one job: a line of `kftrain status`."""

    run: str
    task: str
    job: str
    state: str
    reason: str
    progress: str
    workers: str
    """Workers that run, of all of them: `2/4`."""
    age_seconds: float


class Jobs(Protocol):
    """Actions on jobs that are there, whoever has started them. `run` is the URI of a run's folder, or its id.

    All but `describe` raise LaunchError where the run has no job, and for what a backend cannot do.
    """

    job_words: ClassVar[str] = "a job"
    """A job of the backend in words, for its errors."""

    def describe(self, run: str) -> list[JobStatus]:
        """Return the status of a run's jobs; with an empty `run`, of the jobs of all runs."""

    def cancel(self, run: str) -> list[str]:
        """End the jobs of a run after a commit, and wait until they are gone; return their names."""

    def suspend(self, run: str) -> list[str]:
        """Take the pods of a run's jobs away after a commit, until `unsuspend`; return the jobs' names.

        Refuses by default: not all jobs can give up their place and come back.
        """
        fix = "end it with kftrain cancel; kftrain run --resume goes on from its last commit"
        raise LaunchError(f"{self.job_words} cannot be suspended", where=run, fix=fix)

    def unsuspend(self, run: str) -> list[str]:
        """Let the suspended jobs of a run go on; return their names. Refuses by default, as `suspend` does."""
        return self.suspend(run)

    def logs(self, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
        """Write the lines that the workers have printed; with `follow`, until the job has ended."""


class Launcher(Jobs, Protocol):
    """Runs one attempt of a job at a time."""

    interrupted: bool = False
    """True once this process was told to stop, so that the caller makes no further attempt."""

    def check(self) -> None:
        """Raise LaunchError if such jobs cannot be created from here; by default they can."""
        return

    def build(self, spec: JobSpec) -> Request:
        """Return at least the request that `run` would make. Pure. Raises LaunchError if the backend cannot run it."""

    def prepare(self, spec: JobSpec) -> None:
        """Get ready, in the background, to `run` a job of this task, where that saves time.

        The environment of the job may still change. `close` undoes the preparation. By default there is none: a job
        that waits would hold its nodes.
        """
        return

    def run(self, spec: JobSpec) -> int:
        """Start the job, stream its output to stdout, and return its exit code when all its processes are gone.

        Blocks. May be called again for the same job after a failure: the new attempt goes on from the last commit.
        SIGTERM and SIGINT reach the job as SIGTERM, and the call still returns only when it has ended.
        """

    def close(self) -> None:
        """Let go of everything that is kept for another attempt: there will be none. By default nothing is kept."""
        return

    def clean(self, paths: RunPaths, job_id: str) -> list[str]:
        """Remove everything that jobs of a run have left behind; return a name for each. Raises LaunchError.

        `job_id` is Kubeflow's id of the pipeline run that ends; another one may be at work on the same run.
        """


def build_launcher(config: Config) -> Launcher:
    """Build the launcher of `launch.backend`, without a connection. Raises LaunchError if it cannot run such jobs."""
    backend = BACKENDS[config.launch.backend]
    if backend.has_pods:
        from kftrain.launch.kubernetes.launcher import ClusterLauncher

        return ClusterLauncher(config)
    launcher: Launcher = importlib.import_module(backend.module).build_launcher(config)
    return launcher


def find_jobs(config: Config | None, namespace: str = "", warn: Progress = to_log) -> Jobs:
    """Return access to a run's jobs, where its configuration says or, without one, on the cluster in every kind.

    Args:
        config: The configuration of the run, if it could be read.
        namespace: A namespace of the cluster; empty: that of the configuration, or of the kubeconfig's context.
        warn: Takes warnings about facts that stay unknown.
    """
    if config is not None and not config.launch.has_pods:
        return build_launcher(config)
    from kftrain.launch.kubernetes.control import ClusterJobs
    from kftrain.launch.kubernetes.kinds import load_kinds

    return ClusterJobs(load_kinds(), namespace or (config.launch.kubernetes.namespace if config else ""), warn)


def require_remote_jobs(config: Config, who: str) -> None:
    """Raise LaunchError if jobs would run below their launcher, since `who` has neither torch nor a GPU."""
    if config.launch.is_remote:
        return
    what = f"{who} have neither torch nor a GPU: they launch jobs"
    fix = f"set it to {' or '.join(name for name, backend in BACKENDS.items() if backend.is_remote)}"
    raise LaunchError(what, where="launch.backend", value=config.launch.backend, fix=fix)
