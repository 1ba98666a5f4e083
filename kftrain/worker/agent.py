"""The process that a node's ranks are forked from: `python -m kftrain.worker.agent`, started by the supervisor.

It reads torch once, then forks one process a rank: reading it takes longer than anything else between a failure and the
next step, and every rank would do it for itself. Nothing of torch has begun here: no thread, no device, no group. The
environment of each rank is torchrun's (`RANK`, `WORLD_SIZE`, `MASTER_ADDR` …).

The agent outlives an attempt: it reports how the ranks have ended, and waits for the next attempt's environment on its
standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping

from kftrain.core import storage
from kftrain.launch.spec import ERROR_FILE_ENV
from kftrain.process import store_socket
from kftrain.process.kept import Reporter
from kftrain.process.parent_death import die_with_parent
from kftrain.process.signals import to_shell_code
from kftrain.run.error import read_error
from kftrain.run.job_tasks import JOB_TASKS
from kftrain.worker import rank, root_cause
from kftrain.worker.node import NodeSpec
from kftrain.worker.root_cause import Failure

SAME_MOMENT_SECONDS = 0.1
"""Seconds within which all failures of ranks are reported: the order in which they ended says little."""

GRACE_SECONDS = 30.0
"""Seconds that the other ranks have to end after SIGTERM, once one has failed."""

POLL_SECONDS = 0.02
PR_SET_NAME = 15  # <linux/prctl.h>


def main(argument: str) -> None:
    """Run attempts until the supervisor is gone. In a forked rank, exit with the rank's exit code."""
    reporter = Reporter()
    node = NodeSpec.from_argument(argument)
    with contextlib.suppress(ImportError, OSError, RuntimeError):  # each rank meets it again and logs it
        rank.import_function(JOB_TASKS[node.task])
    while reporter.begin():
        reporter.end(_write_cause(wait_for_ranks(_fork_ranks(node, reporter))))


def _fork_ranks(node: NodeSpec, reporter: Reporter) -> dict[int, int]:
    """Fork the ranks; return process id -> rank. In a rank it does not return."""
    agent = os.getpid()
    address, port, listener = node.address, node.port, None
    if node.nodes == 1:  # bound before the forks: rank 0 inherits the socket, so no other process can take the port
        listener = store_socket.open_listener(node.processes)
        address, port = listener.getsockname()[:2]
    ranks = {}
    for local_rank in range(node.processes):
        environment = node.build_rank_environment(local_rank, address, port)
        if listener is not None and local_rank == 0:
            environment[store_socket.STORE_ENV] = str(listener.fileno())
        pid = os.fork()
        if not pid:
            reporter.close()
            if listener is not None and local_rank:
                listener.close()
            elif listener is not None:
                listener.detach()
            _become_rank(node, environment, agent)
        ranks[pid] = int(environment["RANK"])
    if listener is not None:
        listener.close()
    return ranks


def _become_rank(node: NodeSpec, environment: Mapping[str, str], agent: int) -> None:
    """Turn this fork into a rank, run it, and exit with its code."""
    os.setsid()  # a signal to the group of whoever started the job is not for it
    die_with_parent(agent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.update(environment)
    with contextlib.suppress(AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{environment['RANK']}".encode())
    sys.exit(rank.run_rank(node.task, node.run_uri, node.digest))


def wait_for_ranks(ranks: Mapping[int, int]) -> list[Failure]:
    """Wait until all ranks have ended; return the failures of the moment in which the first one failed, in order.

    The other ranks then get SIGTERM, and SIGKILL after `GRACE_SECONDS`. Their exit codes are not reported as failures.
    """
    running, failures, told_at = dict(ranks), list[Failure](), 0.0
    first_at = 0.0
    while running:
        # As long as all is well this sleeps until one ends: an agent must cost nothing beside its ranks. Once one has
        # failed it has deadlines to keep, so it looks, and sleeps in between.
        pid, status = os.waitpid(-1, os.WNOHANG if failures else 0)
        now = time.time()
        if pid in running:
            code, number = os.waitstatus_to_exitcode(status), running.pop(pid)
            # What ends later was asked to, or has lost its peer: reported, it would hide the cause.
            if code and (not failures or now - first_at <= SAME_MOMENT_SECONDS):
                first_at = first_at or now
                failures.append(Failure(number, code, now))
        elif failures:
            told_at = _end_others(running, now, first_at, told_at)
            time.sleep(POLL_SECONDS)
    return failures


def _end_others(running: Mapping[int, int], now: float, first_at: float, told_at: float) -> float:
    """Ask, later kill, the ranks that still run; return when they were asked, 0 for not yet."""
    if not told_at and now - first_at > SAME_MOMENT_SECONDS:  # sooner, those that fail by themselves would die of it
        _signal_ranks(running, signal.SIGTERM)
        return now
    if told_at and now - told_at > GRACE_SECONDS:
        _signal_ranks(running, signal.SIGKILL)
    return told_at


def _signal_ranks(pids: Mapping[int, int], number: int) -> None:
    for pid in pids:  # none of them is waited for yet, so each id is still theirs
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _write_cause(failures: list[Failure]) -> int:
    """Write the error of the rank that was the cause, unless it did so itself; return its exit code, 0 for none."""
    if not failures:
        return 0
    error_file = os.environ[ERROR_FILE_ENV]
    first, document = root_cause.find_cause(failures, read_error(error_file))
    if document is not None:
        with contextlib.suppress(OSError):  # the disk is full: the exit code says enough
            storage.publish_json(error_file, document.to_dict())
    return to_shell_code(first.returncode)


if __name__ == "__main__":
    main(sys.argv[1])
