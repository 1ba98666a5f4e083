"""The protocol of a launcher: what starts a job and sees it to its end."""

from __future__ import annotations

from typing import Protocol

from kftrain.config import Config
from kftrain.errors import LaunchError
from kftrain.launch.spec import JobSpec


class Launcher(Protocol):
    """Runs one attempt of a job. Building a request is the launcher's pure part; `run` is its effect."""

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


def build_launcher(config: Config) -> Launcher:
    """The launcher of `launch.backend`. Raises LaunchError where it cannot run this job."""
    if config.launch.backend == "pytorchjob":
        from kftrain.launch.kubernetes.launcher import ClusterLauncher

        return ClusterLauncher(config)
    if config.launch.nodes != 1:
        raise LaunchError(
            "the local backend has one node", where="launch.nodes", value=config.launch.nodes, fix="set it to 1"
        )
    from kftrain.launch.local import LocalLauncher

    return LocalLauncher()
