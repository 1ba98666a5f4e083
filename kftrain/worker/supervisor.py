"""The supervisor: one per node, PID 1 in a worker pod, a plain process on a laptop. Imports no torch.

It starts the agent, which forks the ranks (without restarts of its own: a restart is a new attempt, from the last
commit), passes SIGTERM on to the ranks alone, so that they commit a checkpoint and end by themselves, and exits with a
code that says whether another attempt makes sense: 0 only where the file that proves the job complete is there.

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
from pathlib import Path
from types import FrameType

import psutil

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.errors import FencedError, KftrainError, LostPeerError, Preempted
from kftrain.launch.spec import ERROR_FILE_ENV, NODE_NAME_ENV
from kftrain.process.kept import KeptProcess, Reporter
from kftrain.process.liveness import LIVENESS_ENV
from kftrain.process.machine import require_lockable_memory
from kftrain.process.output import OUTPUT_ENV, Output
from kftrain.process.parent_death import die_with_parent
from kftrain.process.signals import INTERRUPT, handle_signals
from kftrain.process.termination import leave_message
from kftrain.run import attempts
from kftrain.run.best_effort import REPORT_SECONDS, best_effort, retryable
from kftrain.run.config import read_job_config
from kftrain.run.error import ErrorDocument, read_error
from kftrain.run.heartbeat import LOOKS_PER_TIMEOUT, LauncherWatch
from kftrain.run.job_tasks import JOB_TASKS
from kftrain.run.logs import build_logs_uri, find_next_attempt, publish_log
from kftrain.worker import root_cause
from kftrain.worker.node import NodeSpec, first_node_answers
from kftrain.worker.root_cause import Stop
from kftrain.worker.watchdog import LOOK_SECONDS, Watchdog, end_with_stacks

AGENT_MODULE = "kftrain.worker.agent"

ENDING_SECONDS = 1800.0
"""Seconds that processes may take to end once one has failed: one may still write a checkpoint."""

FIRST_NODE_POLL_SECONDS = 2.0
FIRST_NODE_MISSES = 3
"""Looks in a row that must find the first node gone: a name may not resolve for a moment."""


def run_node(node: NodeSpec) -> int:
    """Run a node of a job, again as long as a launcher that keeps this process asks for it; return the last exit code.

    Between attempts a SIGTERM ends this process, as it would any: there is nothing that could be committed.
    """
    reporter, code = Reporter(), 0
    # A session of its own: Slurm and terminals signal whole process groups, and nobody else would wait for the ranks.
    agent = KeptProcess([sys.executable, "-m", AGENT_MODULE, node.to_argument()], new_session=True)
    if reporter.is_kept:
        agent.prepare(node.build_environment())
    while reporter.begin():
        code = Supervisor(node, agent).run()
        reporter.end(code)
    agent.close()
    return code


class Supervisor:
    """Runs one attempt of a node of a job.

    The attempt goes from *starting* to *running* when the agent is told to begin, and to *ended* when the agent has
    reported how the ranks ended. Meanwhile it may become *stopping*, from starting or running: by a signal, or because
    the launcher is silent; and from there *killed*. The signal handler, the two watching threads and the main thread
    all make such steps. Each is a fact that becomes true and stays so: none takes back what another has seen, so none
    needs a lock, which a signal handler must not take.

    `agent`: the process that the ranks are forked from; whoever makes it closes it.
    """

    def __init__(self, node: NodeSpec, agent: KeptProcess) -> None:
        self._node = node
        self._paths = node.paths
        self._task = JOB_TASKS[node.task]
        self._agent = agent
        self._started = False
        self._stop = Stop()
        self._attempt: int | None = None
        """Number that the attempt's claim will get; None while it is unknown, and for a task that claims none."""
        self._ended = threading.Event()
        self._ranks = Ranks(agent, self._ended)

    def run(self) -> int:
        """Run the attempt; return the exit code of its first failure, 0 where the job is complete."""
        die_with_parent(os.getppid())  # of a pod or a shell; a launcher of ours has said who it is
        with handle_signals([signal.SIGTERM, INTERRUPT], self._on_signal):
            return self._run()

    def _run(self) -> int:
        """Run the ranks unless the job is complete already; announce the error that ends the attempt, if any."""
        try:
            with retryable("the run cannot be read", self._paths.uri):
                config = read_job_config(self._paths, self._node.digest)
                complete = self._task.meets and self._task.is_complete(self._paths, config)
                self._attempt = find_next_attempt(
                    self._paths, self._node.task
                )  # now: its claim would change the answer
            # Before any rendezvous: a pod that is started once more would wait for nodes that are gone.
            if complete:
                to_log("already complete: nothing to do")
                return 0
            error = self._run_processes(config)
            if error is None and self._task.meets and not self._node.is_first:
                self._wait_for_first_node(config)
        except KftrainError as failure:
            error = ErrorDocument.of(failure)
            announce_error(self._node, error, self._attempt)
        return error.exit_code if error else 0

    def _run_processes(self, config: Config) -> ErrorDocument | None:
        """Run the ranks to their end, then publish error and logs; the error first, as there may be little time."""
        if self._stop.asked:
            raise Preempted("stopped before it had started")
        require_lockable_memory()
        with tempfile.TemporaryDirectory(prefix="kftrain-") as folder:
            error_file = Path(folder) / "error.json"
            names = [f"rank-{rank}" for rank in self._node.ranks]
            with Output(Path(folder), names, named=self._node.world_size > 1) as output:
                returncode = self._run_ranks(output.folder, error_file, config.launch.timeout_seconds)
            error = self._find_error(returncode, error_file, config)
            if error is not None:
                announce_error(self._node, error, self._attempt)
            for path in output.logs.values():
                publish_log(path, storage.join(build_logs_uri(self._paths, self._node.task, self._attempt), path.name))
        return error

    def _run_ranks(self, folder: Path, error_file: Path, timeout_seconds: float) -> int:
        """Let the agent run the ranks, under watch, until it reports their end; return its exit code."""
        node, liveness = self._node, folder / "liveness"
        liveness.mkdir()
        files = {ERROR_FILE_ENV: str(error_file), OUTPUT_ENV: str(folder), LIVENESS_ENV: str(liveness)}
        self._agent.start({**node.build_environment(), **files})
        self._started = True
        if self._stop.asked:  # while it started: the handler found nobody to ask
            self._ranks.ask_to_stop()
        leads = node.is_first or not self._task.meets  # the first one's ranks take the others along
        if leads and node.launcher_timeout_seconds:
            watch = LauncherWatch(self._paths, node.launcher_timeout_seconds)
            threading.Thread(target=self._watch_launcher, args=(watch,), daemon=True, name="launcher-watch").start()
        watchdog = Watchdog(liveness, node.ranks, timeout_seconds)
        threading.Thread(target=self._watch_ranks, args=(watchdog, error_file), daemon=True, name="watchdog").start()
        try:
            return self._agent.wait()
        finally:
            self._ended.set()

    def _find_error(self, returncode: int, error_file: Path, config: Config) -> ErrorDocument | None:
        """Return the error of this node's processes; None for none, which only the first node has to prove."""
        error = read_error(str(error_file))
        if error is None and returncode:
            error = root_cause.describe_silent_end(returncode)
        if root_cause.may_be_complete(error, self._stop) and self._is_complete(config):
            return None  # it was stopped when all was done: another attempt would have nothing to do
        return root_cause.judge_node(error, self._stop, self._node)

    def _is_complete(self, config: Config) -> bool:
        """Tell whether the job is known to be complete; False while storage cannot say."""
        with best_effort("whether the job is complete is not known"):
            return self._task.meets and self._task.is_complete(self._paths, config)
        return False

    def _wait_for_first_node(self, config: Config) -> None:
        """Return when the job is complete. Raises Preempted, or LostPeerError when the first node is gone.

        The first node exports alone. A node that had left by then could not help with another attempt, if the first one
        is lost before its export is complete.
        """
        misses = 0
        while True:
            # The first node completes the job, then ends: whether it answers is asked first, so that one which
            # completes and goes between the two questions is not taken for lost.
            misses = 0 if first_node_answers(self._node) else misses + 1
            if self._is_complete(config):
                return
            if self._stop.asked:
                raise Preempted("stopped before the first node had completed the job")
            if misses == FIRST_NODE_MISSES:
                raise LostPeerError(f"{root_cause.LOST_PEER}: the first node went before it had completed the job")
            time.sleep(FIRST_NODE_POLL_SECONDS)

    def _watch_launcher(self, watch: LauncherWatch) -> None:
        """Ask the job to stop when its launcher has been silent for too long, and kill it if it does not.

        A commit gets as long again, counted in slices, because a machine that pauses does not work meanwhile. Killing
        the agent is enough: its ranks die with it.
        """
        while not watch.poll():
            if self._ended.wait(watch.interval_seconds):
                return
        to_log(f"the launcher has been silent for {watch.timeout_seconds:g} s: stopping")
        self._stop.silent_seconds = watch.timeout_seconds  # before the ranks end: that ends with the reason for it
        self._ask_to_stop()
        for _ in range(LOOKS_PER_TIMEOUT):
            if self._ended.wait(watch.interval_seconds):
                return
        self._stop.killed = True
        self._agent.kill()

    def _watch_ranks(self, watchdog: Watchdog, error_file: Path) -> None:
        """End the processes if they hang. Two looks in a row must find it: a beat may be written while it is read."""
        before, ending_seconds = None, 0.0
        while not self._ended.wait(LOOK_SECONDS):
            # From when the first process has left its error: before that, only the watchdog knows whether one is late.
            ending_seconds += LOOK_SECONDS if error_file.exists() else 0.0
            if ending_seconds > ENDING_SECONDS:  # one has failed, and a thread of the user's keeps the others alive
                self._ranks.end_with_stacks()
                return
            hang = watchdog.look()
            if hang is not None and before is not None:
                # The error first: the ranks that are killed leave none, and one that now loses its peer comes too late.
                publish_error(str(error_file), ErrorDocument.of(hang.error, rank=hang.rank))
                self._ranks.end_with_stacks()
                return
            before = hang

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        """Ask the ranks to stop, once however often this is called: Kubernetes and the launcher may both ask."""
        if not self._stop.asked:
            self._stop.asked = True
            if self._started:  # an agent that is kept is there before: it would be taken for one without ranks
                self._ranks.ask_to_stop()


def announce_error(node: NodeSpec, error: ErrorDocument, attempt: int | None) -> None:
    """Say why this node failed: on the console, to Kubernetes and in error.json; storage last, as it may be slow."""
    name = os.environ.get(NODE_NAME_ENV) or socket.gethostname()
    where = {"node": name, "node_rank": node.node_rank, "pod": socket.gethostname()}
    who = f"node {name}" if error.rank is None else f"node {name}, rank {error.rank}"
    sys.stderr.write(f"{who}: {error.line}\n")
    document = error.model_copy(update={**where, "stage": node.task, "attempt": attempt})
    leave_message(document.line, document.exit_code, document.kind)
    if error.exit_code == FencedError.exit_code:  # the run is another's, and so is what it says of itself
        return
    with best_effort("error.json could not be written", REPORT_SECONDS):
        # A node that was paused comes back: by then a newer attempt holds the run, or has completed it.
        if attempt is None or attempts.find_last_attempt(node.paths) <= attempt:
            publish_error(node.paths.error, document)


def publish_error(uri: str, error: ErrorDocument) -> None:
    """Publish the error of a job or a node. The first one stays, unless it was only a consequence of this one."""
    try:
        storage.create_json(uri, error.to_dict())
    except FileExistsError:
        published = read_error(uri)
        if published is None or root_cause.outranks(error, published):
            storage.publish_json(uri, error.to_dict())


RETRY_SECONDS = 0.2
"""Seconds between two looks for ranks that start after they were asked to stop."""


class Ranks:
    """The ranks of one attempt. `ended` is set once the agent has reported their end: their ids may be others' then."""

    def __init__(self, agent: KeptProcess, ended: threading.Event) -> None:
        self._agent = agent
        self._ended = ended
        self._asked: set[psutil.Process] = set()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to each rank once, so that it commits; to those that start later, as soon as they are there.

        Once, because a second SIGTERM would reach a rank that has left its training loop, where it ends the process at
        once. Children of a rank get none: a data loader's worker would die of it and take the rank along. The agent
        gets none either, as nobody else would wait for the ranks; it is ended only before it has started any, because
        there is nothing to commit then.
        """
        pid = self._agent.pid
        if pid is None or self._ended.is_set():
            return
        ranks = [child for agent in _find_process(pid) for child in _list_children(agent)]
        for process in ranks or ([] if self._asked else _find_process(pid)):
            if process not in self._asked:
                self._asked.add(process)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
        # The agent may be between two forks, so it is looked again. A timer, not a loop: this runs in a signal handler.
        timer = threading.Timer(RETRY_SECONDS, self.ask_to_stop)
        timer.daemon = True
        timer.start()

    def end_with_stacks(self) -> None:
        """Kill the ranks and all processes below them, once they have written their stacks."""
        pid = self._agent.pid
        if pid is not None:
            end_with_stacks([child for agent in _find_process(pid) for child in _list_children(agent, recursive=True)])


def _find_process(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid)]
    return []


def _list_children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = process.children(recursive=recursive)
    return children
