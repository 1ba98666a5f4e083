"""Several processes that encode parts: `map_jobs` hands out the parts and collects what became of them.

Each process is a fresh interpreter with the search path of this one, so that a user's own modules are found and nothing
of this process (threads, open connections) is copied half. Messages are JSON on a socket that nobody prints to. The
kernel ends the processes with this one; one that is killed makes this one fail with an error that another attempt may
not see.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait

from kftrain.errors import error_from_dict
from kftrain.process.child import Child, Message, receive

WORKER_MODULE = "kftrain.sharding.parts.part_worker"


def map_jobs(jobs: Sequence[Message], first_message: Message, num_processes: int) -> Iterator[tuple[int, Message]]:
    """Yield the answers to all jobs as they come, each with the number of its job; jobs are begun in order.

    Raises what a job has raised: KftrainError. A process that ends without an answer is a RetryableError.
    """
    waiting, busy = deque(range(len(jobs))), dict[object, tuple[Child, int]]()
    start = f"from {WORKER_MODULE} import main; main(*map(int, sys.argv[1:]))"
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"]

    def give_job(child: Child) -> None:
        busy[child.connection] = child, waiting.popleft()
        child.send(jobs[busy[child.connection][1]])

    with contextlib.ExitStack() as stack:
        for child in [stack.enter_context(Child(command)) for _ in range(min(num_processes, len(jobs)))]:
            child.send(first_message)
            give_job(child)
        while busy:
            for connection in wait([child.connection for child, _ in busy.values()]):
                child, number = busy.pop(connection)
                answer = receive(child.connection)
                if answer is None:
                    fix = "fewer processes need less memory"
                    raise child.make_lost_error("a process that encodes parts", "data.processes", fix)
                if "error" in answer:
                    raise error_from_dict(answer["error"])
                if waiting:
                    give_job(child)
                yield number, answer
