"""The roles beside the workers as processes of this machine: started with the workers, told to stop after them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.errors import DataError, LostPeerError, Preempted, is_error_document
from kftrain.launch.spec import ERROR_FILE_ENV, NODE_RANK_ENV, Role
from kftrain.process.output import Output
from kftrain.process.parent_death import bind_command
from kftrain.process.signals import describe_end, to_shell_code
from kftrain.run.error import ErrorDocument

GRACE_SECONDS = 30.0
"""Seconds that a node has to end once it is told to stop: the default grace of a pod."""

SAME_TIME_SECONDS = 1.0
"""Seconds by which a failed node may be seen to end after the workers that lost it."""

TAIL_LINES = 40
TAIL_BYTES = 1 << 16

CONSEQUENCES = frozenset((Preempted.__name__, LostPeerError.__name__))
"""Errors of workers that end because another node of the job has: they were asked to stop, or lost it."""


@dataclass(frozen=True)
class RoleFailure:
    """A node that failed while the workers were at work."""

    place: str
    """Role and number of the node: `server-0`."""
    node_rank: int
    returncode: int
    """Return code of `subprocess`: -N for death by signal N."""


def find_root_cause(failures: Sequence[RoleFailure], left: ErrorDocument | None) -> RoleFailure | None:
    """Return the first node that failed, as its failure ended the job; None where the workers' error, `left`, did."""
    is_own = left is not None and left.kind not in CONSEQUENCES
    return None if is_own or not failures else failures[0]


class RoleProcesses:
    """Context manager that runs the nodes of the other roles; it shows their output and keeps it in `logs`.

    Args:
        command: The command `kftrain`, with an absolute path first.
        roles: The roles beside the workers.
        environment: Variables of every node; its number within its role is added.
        folder: An empty one, for logs and errors.
        on_failure: Called in a thread for each node that fails within the block.
        is_needed: Whether the job needs the node of a role with this number; a node that was added may not be, yet.
    """

    def __init__(
        self,
        command: Sequence[str],
        roles: Sequence[Role],
        environment: Mapping[str, str],
        folder: Path,
        on_failure: Callable[[], None],
        is_needed: Callable[[Role, int], bool] = lambda role, node_rank: True,
    ) -> None:
        self._command = tuple(command)
        self._nodes = {f"{role.name}-{rank}": (role, rank) for role in roles for rank in range(role.replicas)}
        self._environment = environment
        self._folder = folder
        self._on_failure = on_failure
        self._is_needed = is_needed
        self._failures: list[RoleFailure] = []
        self._has_failed = threading.Event()
        self._is_stopping = False
        self._lock = threading.Lock()
        self._num_lost: Counter[str] = Counter()  # of each role
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._stack = contextlib.ExitStack()
        self._outputs = contextlib.ExitStack()
        self.logs: dict[str, Path] = {}
        """Place of a node, `server-0` -> its log file."""

    def __enter__(self) -> RoleProcesses:
        with contextlib.ExitStack() as stack:  # in this order backwards: a node prints to its end
            stack.enter_context(self._outputs)
            stack.callback(self._stop)
            self._start_all(list(self._nodes), self._folder)
            self._stack = stack.pop_all()
        return self

    def add(self, name: str, replicas: int) -> None:
        """Start the nodes of a role below a number of them that are not at work."""
        role = next(role for role, _ in self._nodes.values() if role.name == name)
        for node_rank in range(replicas):
            place = f"{name}-{node_rank}"
            if place not in self._threads or not self._threads[place].is_alive():
                self._nodes[place] = (role, node_rank)
                folder = self._folder / f"{place}-{time.monotonic_ns()}"
                folder.mkdir()
                self._start_all([place], folder)

    def __exit__(self, *caught: object) -> None:
        self._stack.close()

    @property
    def has_failed(self) -> bool:
        """True once a node has failed."""
        return self._has_failed.is_set()

    def wait_for_failures(self) -> list[RoleFailure]:
        """Return the nodes that failed, for workers that have failed: waits a moment for a node that is just ending."""
        self._has_failed.wait(SAME_TIME_SECONDS)
        return list(self._failures)

    def explain(self, failure: RoleFailure, task: str, attempt: int | None) -> ErrorDocument:
        """Build the error of a failed node from the one that it left, or from how it ended; with its last lines."""
        left: Any = None
        with contextlib.suppress(DataError, OSError):  # it was killed while it wrote
            left = storage.read_json_if_exists(str(self._error_file(failure.place)))
        if not is_error_document(left):
            line = f"{failure.place} ended by {describe_end(failure.returncode)} without a word"
            left = {"kind": "", "exit_code": to_shell_code(failure.returncode), "line": line}
        where = {"node": socket.gethostname(), "node_rank": failure.node_rank, "stage": task, "attempt": attempt}
        tail = _read_tail(self.logs[failure.place])
        return ErrorDocument.salvage({**left, **where, "last_lines": tail, "time": time.time()})

    def _start_all(self, places: list[str], folder: Path) -> None:
        output = self._outputs.enter_context(Output(folder, places, named=True))
        self.logs |= output.logs
        for number, place in enumerate(places):
            self._start(folder / str(number), place)

    def _start(self, pipe_path: Path, place: str) -> None:
        role, node_rank = self._nodes[place]
        own = {NODE_RANK_ENV: str(node_rank), ERROR_FILE_ENV: str(self._error_file(place)), "PYTHONUNBUFFERED": "1"}
        with pipe_path.open("wb", buffering=0) as pipe:
            # A session of its own: Ctrl-C on a terminal is for the launcher, which lets the workers commit first.
            process = subprocess.Popen(
                bind_command([*self._command, *role.arguments]),
                env={**self._environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[place] = process
        thread = threading.Thread(target=self._wait, args=(process, place, node_rank), daemon=True, name=place)
        self._threads[place] = thread
        thread.start()

    def _wait(self, process: subprocess.Popen[bytes], place: str, node_rank: int) -> None:
        code = process.wait()
        if not code or self._is_stopping:
            return
        role, _ = self._nodes[place]
        is_needed = self._is_needed(role, node_rank)
        with self._lock:
            num_lost = self._num_lost[role.name] = self._num_lost[role.name] + is_needed
        if not is_needed or num_lost <= role.num_spare:
            to_log(f"{place} ended by {describe_end(code)}; the job goes on without it")
        else:
            self._failures.append(RoleFailure(place, node_rank, code))
            self._has_failed.set()
            self._on_failure()

    def _stop(self) -> None:
        """Tell all nodes to stop at once, because they may wait for each other; kill those that outlast their grace."""
        self._is_stopping = True
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for place, process in self._processes.items():
            thread = self._threads[place]
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():  # nobody has waited for the process yet, so its id is still its own
                os.killpg(process.pid, signal.SIGKILL)
                thread.join()

    def _error_file(self, place: str) -> Path:
        return self._folder / f"{place}.error.json"


def _read_tail(log: Path) -> list[str]:
    """Return the last lines of a log, read from its end; none if it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
        return stream.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    return []
