"""The supervisor: one per node, PID 1 in a worker pod, a plain process on a laptop. Imports no torch.

It starts the agent, which forks the ranks (without restarts of its own: a restart is a new attempt, from the last
commit), passes SIGTERM on to the ranks alone, so that they commit a checkpoint and end by themselves, and exits with a
code that says whether another attempt makes sense: 0 only where the file that proves the job complete is there.

The agent is not told about the SIGTERM: without it nobody would wait for the ranks. Only before it has started any is
it ended itself.

On the first node it also watches the launcher: when that one is silent for too long, the job is stopped as if it were
preempted, and ends for good.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import cast

import psutil

from kftrain import storage
from kftrain.config import Config
from kftrain.errors import FencedError, KftrainError, Preempted, RetryableError
from kftrain.launch.spec import (
    ADDRESS_ENV,
    LAUNCHER_TIMEOUT_ENV,
    NODE_NAME_ENV,
    NODE_RANK_ENV,
    RENDEZVOUS_PORT,
)
from kftrain.process.kept import KeptProcess, Reporter
from kftrain.process.liveness import LIVENESS_ENV
from kftrain.process.machine import num_cpus
from kftrain.process.parent_death import die_with_parent
from kftrain.process.signals import INTERRUPT, handled
from kftrain.process.termination import leave_message
from kftrain.progress import to_log
from kftrain.run import attempts, documents
from kftrain.run.best_effort import REPORT_SECONDS, best_effort, retryable
from kftrain.run.completion import JobTask, is_complete
from kftrain.run.config import read_job_config
from kftrain.run.heartbeat import LauncherWatch
from kftrain.run.paths import RunPaths
from kftrain.worker import root_cause
from kftrain.worker.node_job import NodeJob
from kftrain.worker.output import OUTPUT_ENV, Output, shortened
from kftrain.worker.root_cause import Document
from kftrain.worker.watchdog import LOOK_SECONDS, Watchdog, end_with_stacks

AGENT_MODULE = "kftrain.worker.agent"
ERROR_FILE_ENV = "KFTRAIN_ERROR_FILE"
"""Where the first failing process of a node writes its error."""

RETRY_SECONDS = 0.2
"""Between two looks for workers that have not started yet when SIGTERM arrives."""

ENDING_SECONDS = 1800.0
"""How long processes may take to end once one of them has failed: a checkpoint that is being written is waited for."""

FIRST_NODE_POLL_SECONDS = 2.0
FIRST_NODE_MISSES = 3
"""How many looks in a row must find the first node gone: a name may not resolve for a moment."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a job meet, and which of them this is."""

    nodes: int = 1
    node_rank: int = 0
    address: str = ""
    """Name of node 0; a single node needs none."""

    @classmethod
    def from_environment(cls, nodes: int) -> Rendezvous:
        """Of a job with so many nodes, as the launcher described it in the environment."""
        return cls(nodes, int(os.environ.get(NODE_RANK_ENV, "0")), os.environ.get(ADDRESS_ENV, ""))

    def first_node_answers(self) -> bool:
        """Whether rank 0 still runs on the first node, where the others met."""
        try:
            socket.create_connection((self.address, RENDEZVOUS_PORT), timeout=FIRST_NODE_POLL_SECONDS).close()
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class NodeSpec:
    """One node's share of a job."""

    task: JobTask
    paths: RunPaths
    digest: str
    """Of the configuration that the job was started for."""
    processes: int
    rendezvous: Rendezvous = Rendezvous()
    launcher_timeout_seconds: float | None = None
    """How long the launcher may be silent; None: nobody watches it."""

    @classmethod
    def from_environment(cls, task: str, run_uri: str, digest: str, processes: int, nodes: int) -> NodeSpec:
        """Of a job as its launcher described it on the command line and in the environment."""
        timeout = os.environ.get(LAUNCHER_TIMEOUT_ENV)
        return cls(
            task=cast(JobTask, task),
            paths=RunPaths(run_uri),
            digest=digest,
            processes=processes,
            rendezvous=Rendezvous.from_environment(nodes),
            launcher_timeout_seconds=float(timeout) if timeout else None,
        )

    @property
    def ranks(self) -> range:
        """The ranks of this node's processes."""
        first = self.rendezvous.node_rank * self.processes
        return range(first, first + self.processes)

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.rendezvous.nodes * self.processes

    @property
    def is_first(self) -> bool:
        """Whether the process that completes the job is on this node."""
        return self.rendezvous.node_rank == 0

    def environment(self) -> dict[str, str]:
        """What the ranks inherit, all of them the same."""
        return {"OMP_NUM_THREADS": str(max(1, num_cpus() // self.processes)), **os.environ}

    def node_job(self) -> NodeJob:
        """What the agent of this node is started with."""
        return NodeJob(
            task=self.task,
            run_uri=self.paths.uri,
            digest=self.digest,
            processes=self.processes,
            nodes=self.rendezvous.nodes,
            node_rank=self.rendezvous.node_rank,
            address=self.rendezvous.address,
            port=RENDEZVOUS_PORT,
        )


def run_node(share: NodeSpec) -> int:
    """Runs a node's share; again as long as a launcher that keeps this process wants it. Returns the last exit code."""
    reporter, code = Reporter(), 0
    agent = KeptProcess([sys.executable, "-m", AGENT_MODULE, share.node_job().to_argument()])
    if reporter.kept:
        agent.prepare(share.environment())
    while reporter.begin():
        code = Supervisor(share, agent).run()
        reporter.end(code)
    agent.close()
    return code


class Supervisor:
    """Runs one attempt of a node's share of a job.

    `agent`: the process that the ranks are forked from; whoever makes it closes it.
    """

    def __init__(self, share: NodeSpec, agent: KeptProcess) -> None:
        self._share, self._paths, self._agent = share, share.paths, agent
        self._started = False
        self._told: set[psutil.Process] = set()
        self._stopping = self._killed = False
        self._silent_seconds = 0.0
        """For how long the launcher has been silent, once that is too long."""
        self._ended = threading.Event()

    def run(self) -> int:
        """Returns the exit code of this node's share: that of the first failure; 0 where the job is complete."""
        die_with_parent()
        with handled([signal.SIGTERM, INTERRUPT], self._on_signal):
            return self._run()

    def _run(self) -> int:
        try:
            with retryable("the run cannot be read", self._paths.uri):
                config = read_job_config(self._paths, self._share.digest)
                complete = is_complete(self._share.task, self._paths, config)
                logs = self._logs_uri()
            if complete:
                to_log("already complete: nothing to do")
                return 0
            error = self._run_processes(config, logs)
            if error is None and not self._share.is_first:
                self._wait_for_first_node(config)
        except KftrainError as found:
            error = found.to_dict()
            self._announce(error)
        return int(error["exit_code"]) if error else 0

    def _logs_uri(self) -> str:
        """Where this share's logs go. An attempt that fails before its claim shares the folder with the next one."""
        if self._share.task == "train":
            return storage.join(self._paths.logs, f"attempt-{attempts.last_attempt(self._paths) + 1}")
        return storage.join(self._paths.logs, "evaluation")

    def _run_processes(self, config: Config, logs: str) -> Document | None:
        """Runs the ranks to their end; leaves error and logs behind, the error first: there may be little time."""
        if self._stopping:
            raise Preempted("stopped before it had started")
        with tempfile.TemporaryDirectory(prefix="kftrain-") as folder:
            error_file = Path(folder) / "error.json"
            with Output(Path(folder), self._share.ranks, named=self._share.world_size > 1) as output:
                returncode = self._run_ranks(output.folder, error_file, config.launch.timeout_seconds)
            error = self._explained(returncode, error_file, config)
            if error is not None:
                self._announce(error)
            for path in output.logs.values():
                _publish_log(path, storage.join(logs, path.name))
        return error

    def _run_ranks(self, folder: Path, error_file: Path, timeout_seconds: float) -> int:
        share, pulses = self._share, folder / "pulses"
        pulses.mkdir()
        files = {ERROR_FILE_ENV: str(error_file), OUTPUT_ENV: str(folder), LIVENESS_ENV: str(pulses)}
        self._agent.start({**share.environment(), **files})
        self._started = True
        if self._stopping:
            self._stop_ranks()
        if share.is_first and share.launcher_timeout_seconds:
            watch = LauncherWatch(self._paths, share.launcher_timeout_seconds)
            threading.Thread(target=self._watch, args=(watch,), daemon=True, name="launcher-watch").start()
        watchdog = Watchdog(pulses, share.ranks, timeout_seconds)
        threading.Thread(target=self._watch_ranks, args=(watchdog, error_file), daemon=True, name="watchdog").start()
        try:
            return self._agent.wait()
        finally:
            self._ended.set()

    def _explained(self, returncode: int, error_file: Path, config: Config) -> Document | None:
        """The error of this node's processes; None where there is none, which only the first node has to prove."""
        error = storage.read_json_if_exists(str(error_file))
        if error is None and returncode:
            error = root_cause.silent_end(returncode)
        stopped = error is None or error["exit_code"] == Preempted.exit_code
        if (stopped or self._killed) and self._is_complete(config):
            return None
        if error is None:
            what = "all processes ended with 0, but the job is not complete"
            return RetryableError(what, where=self._paths.uri).to_dict() if self._share.is_first else None
        if self._silent_seconds:
            return root_cause.of_silent_launcher(error, self._silent_seconds, self._killed)
        return root_cause.of_stopped_share(error, self._share.task) if self._stopping else error

    def _is_complete(self, config: Config) -> bool:
        """Whether the job is known to be complete."""
        with best_effort("whether the job is complete is not known"):
            return is_complete(self._share.task, self._paths, config)
        return False

    def _wait_for_first_node(self, config: Config) -> None:
        """Returns when the job is complete. Raises Preempted, or RetryableError when the first node is gone.

        It exports alone. A node that had left by then could not help when the first one is lost before it is through.
        """
        misses = 0
        while True:
            misses = 0 if self._share.rendezvous.first_node_answers() else misses + 1
            if self._is_complete(config):
                return
            if self._stopping:
                raise Preempted("stopped before the first node had completed the job")
            if misses == FIRST_NODE_MISSES:
                raise RetryableError(f"{root_cause.LOST_PEER}: the first node went before it had completed the job")
            time.sleep(FIRST_NODE_POLL_SECONDS)

    def _announce(self, error: Document) -> None:
        """Says why this share failed: on the console, to Kubernetes, in error.json."""
        node = os.environ.get(NODE_NAME_ENV) or socket.gethostname()
        where = {"node": node, "node_rank": self._share.rendezvous.node_rank, "pod": socket.gethostname()}
        who = f"node {node}, rank {error['rank']}" if "rank" in error else f"node {node}"
        sys.stderr.write(f"{who}: {error['line']}\n")
        leave_message(str(error["line"]))
        if error["exit_code"] == FencedError.exit_code:  # the run is another's, and so is what it says of itself
            return
        with best_effort("error.json could not be written", REPORT_SECONDS):
            _publish_error(self._paths.error, {**error, **where})

    def _watch(self, watch: LauncherWatch) -> None:
        """Asks the job to stop when its launcher has been silent for too long, and ends it if it does not."""
        while not watch.poll():
            if self._ended.wait(watch.interval_seconds):
                return
        to_log(f"the launcher has been silent for {watch.timeout_seconds:g} s: stopping")
        self._silent_seconds = watch.timeout_seconds
        self._ask_to_stop()
        if not self._ended.wait(watch.timeout_seconds):
            self._killed = True
            self._agent.kill()

    def _watch_ranks(self, watchdog: Watchdog, error_file: Path) -> None:
        """Ends the processes where they hang. Two looks must find it: a beat may be written while it is read."""
        before, ending_seconds = None, 0.0
        while not self._ended.wait(LOOK_SECONDS):
            ending_seconds += LOOK_SECONDS if error_file.exists() else 0.0
            if ending_seconds > ENDING_SECONDS:
                end_with_stacks(_below(self._agent.pid))
                return
            hang = watchdog.look()
            if hang is not None and before is not None:
                _publish_error(str(error_file), {**hang.error.to_dict(), "rank": hang.rank})
                end_with_stacks(_below(self._agent.pid))
                return
            before = hang

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._stop_ranks()

    def _stop_ranks(self) -> None:
        """Sends SIGTERM to each worker once; to those that are still starting, as soon as they can take it."""
        agent = self._agent.pid
        if not self._started or agent is None or self._ended.is_set():
            return
        for process in _ranks_of(agent) or ([] if self._told else _existing(agent)):
            if process not in self._told:
                self._told.add(process)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
        timer = threading.Timer(RETRY_SECONDS, self._stop_ranks)
        timer.daemon = True
        timer.start()


def _publish_error(uri: str, error: Document) -> None:
    """Leaves the error of a job or a node. Of several the first stays, unless that one was no cause."""
    try:
        storage.create_json(uri, error)
    except FileExistsError:
        published = documents.read_error(uri)
        if published is None or root_cause.outranks(error, published):
            storage.publish_json(uri, error)


def _publish_log(path: Path, uri: str) -> None:
    """Adds a log to what is there from an earlier start."""
    with best_effort(f"{path.name} could not be published", REPORT_SECONDS):
        before = storage.read_bytes(uri) if storage.exists(uri) else b""
        storage.publish(uri, shortened(before + path.read_bytes()))


def _existing(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid)]
    return []


def _ranks_of(agent: int) -> list[psutil.Process]:
    """The ranks that the agent, process `agent`, has forked; not what those have forked."""
    return [child for parent in _existing(agent) for child in _children(parent)]


def _below(agent: int | None) -> list[psutil.Process]:
    """The ranks, and all that they have started."""
    if agent is None:
        return []
    return [child for parent in _existing(agent) for child in _children(parent, recursive=True)]


def _children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        found = process.children(recursive=recursive)
    return found
