"""The parameter servers of a job of this machine, which join it and leave it while it is at work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kftrain.config import Config
from kftrain.errors import LaunchError
from kftrain.launch.base import Jobs
from kftrain.launch.role_processes import RoleProcesses
from kftrain.launch.spec import SERVER, JobSpec, Role
from kftrain.run.best_effort import best_effort
from kftrain.run.job_tasks import TRAINING
from kftrain.run.membership import ask_for_servers, read_membership, read_wanted_servers
from kftrain.run.paths import RunPaths

LOOK_SECONDS = 0.5


def change_servers(jobs: Jobs, paths: RunPaths, config: Config, num_servers: int) -> None:
    """Have a run at work go on with another number of servers. Raises LaunchError where that cannot be."""
    fix = "end the run, change server.num_servers, and resume it"
    if not config.server.tables:
        raise LaunchError(
            "this run has no tables on servers", where=paths.uri, fix="server.tables says what they would hold"
        )
    if config.launch.is_remote:
        what = "servers join and leave on one machine alone"
        raise LaunchError(what, where="launch.backend", value=config.launch.backend, fix=fix)
    if config.server.copies > 1:
        what = "servers with copies neither join nor leave"
        raise LaunchError(what, where="server.copies", value=config.server.copies, fix=fix)
    if not any(job.task == TRAINING.name for job in jobs.describe(paths.uri)):
        raise LaunchError("this run does not train on this machine now", where=paths.uri, fix=fix)
    ask_for_servers(paths, config.digest(), num_servers)


class ServersOfJob:
    """The servers of a job: as many as its ring has, and those that are asked for meanwhile."""

    def __init__(self, spec: JobSpec) -> None:
        self._paths = RunPaths(spec.run_uri)
        self._digest = spec.config_digest
        self._request = ""

    def resize(self, roles: Sequence[Role]) -> list[Role]:
        """Return the roles with as many servers as the ring has."""
        return [replace(role, replicas=self._count(role)) if role.name == SERVER else role for role in roles]

    def is_needed(self, role: Role, node_rank: int) -> bool:
        """Return True unless it is a server that has no rows."""
        return role.name != SERVER or node_rank < self._count(role)

    @contextlib.contextmanager
    def adding(self, nodes: RoleProcesses) -> Iterator[None]:
        """Start the servers that are asked for within the block."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._add, args=(nodes, is_over), daemon=True, name="servers-of-job")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _count(self, role: Role) -> int:
        return read_membership(self._paths, self._digest, role.replicas).num_servers

    def _add(self, nodes: RoleProcesses, is_over: threading.Event) -> None:
        while not is_over.wait(LOOK_SECONDS):
            with best_effort("what servers are wanted is not known"):
                wanted = read_wanted_servers(self._paths, self._digest)
                if wanted is not None and wanted.request != self._request:
                    self._request = wanted.request
                    nodes.add(SERVER, wanted.num_servers)
