"""A data worker's process, started by one of a training: `python -m kftrain.train.data_worker SOCKET MEMORY PARENT`.

The worker reads the same samples and builds the same task as that process, without torch unless the task's module
imports it. Signals that end a training do not end the worker: it ends when its socket is closed, or with its parent.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from kftrain.config import Config
from kftrain.core import outages
from kftrain.data.worker_processes import decode_rows
from kftrain.errors import BUG_CODE, error_to_dict, print_traceback
from kftrain.process.child import receive, send
from kftrain.process.parent_death import die_with_parent
from kftrain.run.paths import RunPaths
from kftrain.train.reading import open_for_worker
from kftrain.trust import permit


def main(descriptor: int, memory: int, parent: int) -> int:
    """Decode rows until the parent asks for no more; return the exit code."""
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent may need some more batches to stop well
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    greeting = receive(connection)
    if greeting is None:
        return 0
    # The configuration is the parent's own: what it names may be imported here, too.
    try:
        resolved = permit(Config.model_validate(greeting["config"]))
        outages.limit(resolved.launch.timeout_seconds / 2)
        decode_rows(connection, memory, *open_for_worker(RunPaths(greeting["run"]), resolved))
    except Exception as error:  # noqa: BLE001 - the last line of defence of a process: the parent raises it
        print_traceback(error)
        send(connection, {"error": error_to_dict(error), "fatal": True})
        return BUG_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
