"""The protocol of a launcher: what starts a job and sees it to its end, and what is done with jobs that are there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kftrain.config import Config
from kftrain.errors import LaunchError
from kftrain.launch.backends import BACKENDS, POD_BACKENDS
from kftrain.launch.spec import JobSpec
from kftrain.progress import Progress, to_log
from kftrain.run.paths import RunPaths


@dataclass(frozen=True)
class Request:
    """What a launcher would start, as data."""

    content: dict[str, Any]
    """The document for an API server, or the command and its environment."""
    text: str
    """The same as kubectl or a shell takes it, with a newline at its end."""


@dataclass(frozen=True)
class JobStatus:
    """One line of `kftrain status`."""

    run: str
    task: str
    job: str
    state: str
    reason: str
    progress: str
    workers: str
    """How many of them run: `2/4`."""
    age_seconds: float


class Jobs(Protocol):
    """Jobs that are there, whoever has started them. `run` is the URI of a run's folder, or its id.

    All but `describe` raise LaunchError where the run has no job, and for what a backend cannot do.
    """

    def describe(self, run: str) -> list[JobStatus]:
        """The jobs of a run; with an empty `run` those of all runs."""
        ...

    def cancel(self, run: str) -> list[str]:
        """Ends the jobs of a run after a commit, and waits for it; returns their names."""
        ...

    def suspend(self, run: str) -> list[str]:
        """Takes what the jobs of a run compute on away, after a commit, until `unsuspend`; returns their names."""
        ...

    def unsuspend(self, run: str) -> list[str]:
        """Lets suspended jobs go on; returns their names."""
        ...

    def logs(self, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
        """Writes what the workers have printed; with `follow` until the job has ended."""
        ...


class Launcher(Jobs, Protocol):
    """Runs one attempt of a job at a time."""

    def check(self) -> None:
        """Raises LaunchError where such jobs cannot be created from here."""
        ...

    def build(self, spec: JobSpec) -> Request:
        """What `run` would start, at the least. Pure. Raises LaunchError for what the backend cannot run."""
        ...

    def prepare(self, spec: JobSpec) -> None:
        """Gets ready to `run` a job of this task, in the background, where that saves time; the environment may change.

        Nothing of it is left after `close`.
        """
        ...

    def run(self, spec: JobSpec) -> int:
        """Starts the job, streams its output to stdout, returns its exit code when all its processes are gone.

        Blocks. May be called again for the same job after a failure: the new attempt goes on from the last commit.
        SIGTERM and SIGINT reach the job as SIGTERM, and the call still returns only when it has ended.
        """
        ...

    @property
    def interrupted(self) -> bool:
        """Whether this process was told to stop, so that no further attempt must be made."""
        ...

    def close(self) -> None:
        """Lets go of what is kept for another attempt: there will be none."""
        ...

    def clean(self, paths: RunPaths, job_id: str) -> list[str]:
        """Removes what jobs of a run have left behind; returns what was removed. Raises LaunchError.

        `job_id` is Kubeflow's id of the pipeline run that ends; another one may be at work on the same run.
        """
        ...


def build_launcher(config: Config) -> Launcher:
    """The launcher of `launch.backend`. Raises LaunchError where it cannot run such jobs; connects to nothing."""
    backend = BACKENDS[config.launch.backend]
    if backend.has_pods:
        from kftrain.launch.kubernetes.kinds import kind_of
        from kftrain.launch.kubernetes.launcher import ClusterLauncher

        return ClusterLauncher(config, kind_of(config.launch.backend))
    launcher: Launcher = importlib.import_module(backend.module).build_launcher(config)
    return launcher


def find_jobs(config: Config | None, namespace: str = "", warn: Progress = to_log) -> Jobs:
    """Where the jobs of a run are: as its configuration says, or on the cluster, in any kind, where there is none.

    Args:
        config: Of the run.
        namespace: Of the cluster; empty: that of the configuration, or of the kubeconfig's context.
        warn: Takes what stays unknown.
    """
    if config is not None and not config.launch.has_pods:
        return build_launcher(config)
    from kftrain.launch.kubernetes.control import ClusterJobs
    from kftrain.launch.kubernetes.kinds import all_kinds, kind_of

    if config is None:
        return ClusterJobs(all_kinds(), namespace, warn)
    launch = config.launch
    return ClusterJobs([kind_of(launch.backend)], namespace or launch.kubernetes.namespace, warn)


def require_pods(config: Config, who: str) -> None:
    """Raises LaunchError where jobs would run below their launcher: `who` has neither torch nor a GPU."""
    if config.launch.has_pods:
        return
    raise LaunchError(
        f"{who} have neither torch nor a GPU: they launch jobs",
        where="launch.backend",
        value=config.launch.backend,
        fix=f"set it to {' or '.join(POD_BACKENDS)}",
    )
