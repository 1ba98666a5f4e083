"""Several processes that encode parts: `map_jobs` hands out the parts and collects what became of them.

Each process is a fresh interpreter with the search path of this one, so that a user's own modules are found and nothing
of this process (threads, open connections) is copied half. Messages are JSON on a socket that nobody prints to. The
kernel ends the processes with this one; one that is killed makes this one fail with an error that another attempt may
not see.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from kftrain.errors import FailureClass, RetryableError, error_from_dict

WORKER_MODULE = "kftrain.sharding.parts.part_worker"

END_SECONDS = 10.0
"""Seconds that a process that is told to end may take."""

Message = dict[str, Any]


def map_jobs(jobs: Sequence[Message], first_message: Message, num_processes: int) -> Iterator[tuple[int, Message]]:
    """Yield the answers to all jobs as they come, each with the number of its job; jobs are begun in order.

    Raises what a job has raised: KftrainError. A process that ends without an answer is a RetryableError.
    """
    waiting = deque(range(len(jobs)))
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_Worker(first_message)) for _ in range(min(num_processes, len(jobs)))]
        for worker in workers:
            worker.send(waiting.popleft(), jobs)
        while busy := {worker.connection: worker for worker in workers if worker.job is not None}:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker = busy[connection]
                number = worker.job
                answer = worker.receive()
                if waiting:
                    worker.send(waiting.popleft(), jobs)
                assert number is not None
                yield number, answer


class _Worker:
    """A process that encodes parts; as a context manager it ends the process. As a context manager it ends it."""

    def __init__(self, first_message: Message) -> None:
        self.connection, theirs = Pipe()
        self.job: int | None = None
        """Number of the job that it works on."""
        start = f"import {WORKER_MODULE} as worker; worker.main({theirs.fileno()}, {os.getpid()})"
        code = f"import sys; sys.path[:] = {sys.path!r}; {start}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
        )
        # Closed here, or the end of the process would never be seen as the end of the stream.
        theirs.close()
        self._write(first_message)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        if error[0] is not None:
            self._process.kill()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def send(self, number: int, jobs: Sequence[Message]) -> None:
        """Give the process a job."""
        self.job = number
        self._write(jobs[number])

    def receive(self) -> Message:
        """Return the worker's answer; raise the worker's error, or RetryableError if the worker died.

        Raises what it says that went wrong, or that it is gone.
        """
        try:
            answer = json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise self._make_lost_error() from error
        self.job = None
        if "error" in answer:
            raise error_from_dict(answer["error"])
        return dict(answer)

    def _write(self, message: Message) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionError) as error:
            raise self._make_lost_error() from error

    def _make_lost_error(self) -> RetryableError:
        code = self._process.wait()
        assert code < 0, f"a process that encodes parts ended with exit code {code}: its traceback is in the log"
        error = RetryableError(
            f"a process that encodes parts was ended by {signal.Signals(-code).name}",
            where="data.processes",
            fix="fewer processes need less memory",
        )
        return error.of_class(FailureClass.HOST_MEMORY) if code == -signal.SIGKILL else error


def accept_jobs(descriptor: int) -> tuple[Connection, Message]:
    """Return the worker's end of the socket, and the first message."""
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    return connection, json.loads(connection.recv_bytes())
