"""A real Ray on this machine for the tests: a head and a second node, with a CPU each, in processes of their own.

Ray's Python is $KFTRAIN_RAY_PYTHON: an environment with Ray and with what kftrain[train] needs; kftrain itself is this
repository's.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from helpers.ports import Held

PYTHON_ENV = "KFTRAIN_RAY_PYTHON"
ROOT = Path(__file__).parents[2]
START_SECONDS = 300
MEMORY_BYTES = 100_000_000


def explain_absence() -> str:
    """Return why no Ray can be started here; empty where it can."""
    python = os.environ.get(PYTHON_ENV, "")
    return "" if Path(python).is_file() else f"{PYTHON_ENV} names no Python with Ray and kftrain: see docs/ray.md"


class RayCluster:
    """Context manager of a running cluster; `variables` stand in the environment of its processes."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.python = os.environ[PYTHON_ENV]
        self._folder = folder
        self._variables = variables
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ports = [Held(), Held()]
        self._gcs = f"127.0.0.1:{self._ports[0].number}"
        self.address = f"http://127.0.0.1:{self._ports[1].number}"

    def __enter__(self) -> RayCluster:
        gcs, dashboard = (port.number for port in self._ports[:2])
        # A short path: sockets lie below it.
        self._start("--head", f"--port={gcs}", f"--dashboard-port={dashboard}", f"--temp-dir={self._folder}")
        try:
            self._wait_for(lambda: self.ask("api/version"))
            self.start_node()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *caught: object) -> None:
        """End every process: `ray start --block` ends its own; what it did not, is killed."""
        left = [child for process in self._processes for child in list_children(process.pid)]
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in left:
            if child.is_running():
                child.kill()

    def restart(self) -> None:
        """End every process, and start a new cluster at the same address: what it knew of jobs is gone."""
        self.__exit__()
        self._processes.clear()
        self.__enter__()

    def start_node(self) -> None:
        """Start one more node, and wait until Ray counts it."""
        before = self.count_nodes()
        self._start(f"--address={self._gcs}")
        self._wait_for(lambda: self.count_nodes() > before)

    def count_nodes(self) -> int:
        """Count the nodes that live."""
        rows = self.ask("nodes?view=summary")["data"]["summary"]
        return sum(row["raylet"].get("state") == "ALIVE" for row in rows)

    @property
    def head_pid(self) -> int:
        """Process id of the head's `ray start`, whose children are Ray's own."""
        return self._processes[0].pid

    @contextlib.contextmanager
    def frozen_dashboard(self) -> Iterator[None]:
        """The dashboard takes connections during the block, and answers none."""
        processes = [child for child in list_children(self.head_pid) if "dashboard.py" in " ".join(child.cmdline())]
        processes += [child for process in processes for child in process.children(recursive=True)]
        assert processes, "no dashboard below the head"
        try:
            for process in processes:
                process.suspend()
            yield
        finally:
            for process in processes:
                process.resume()

    def ask(self, path: str):
        """Ask the dashboard by GET."""
        with urllib.request.urlopen(f"{self.address}/{path}", timeout=10) as answer:
            return json.load(answer)

    def _start(self, *options: str) -> None:
        command = [str(Path(self.python).with_name("ray")), "start", "--block", "--disable-usage-stats", *options]
        command += ["--num-cpus=1", f"--object-store-memory={MEMORY_BYTES}"]
        self._ports.append(Held())  # of what takes jobs: by default one number for all nodes, so for all clusters here
        command.append(f"--dashboard-agent-listen-port={self._ports[-1].number}")
        self._processes.append(self._run(command, len(self._processes)))

    def _run(self, command: list[str], number: int) -> subprocess.Popen[bytes]:
        with (self._folder.parent / f"ray-{number}.out").open("ab") as out:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self._environment)

    def _restart_what_gave_up(self) -> None:
        """Ray gives itself 30 s to start, which are not enough on a machine with much other work."""
        for number, process in enumerate(self._processes):
            if process.poll():
                self._processes[number] = self._run(list(process.args), number)

    @property
    def _environment(self) -> dict[str, str]:
        path = f"{Path(self.python).parent}:{os.environ['PATH']}"
        return {**os.environ, **self._variables, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def _wait_for(self, is_so) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if is_so():
                    return
            except OSError:
                pass
            self._restart_what_gave_up()
            logs = "\n".join(path.read_text()[-2000:] for path in self._folder.parent.glob("ray-*.out"))
            assert time.monotonic() < deadline, logs
            time.sleep(0.3)


def list_children(pid: int) -> list[psutil.Process]:
    """All processes below one; none where it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
