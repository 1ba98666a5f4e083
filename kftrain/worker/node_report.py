"""What a node leaves behind where it failed: why, for all who look for it."""

from __future__ import annotations

import os
import socket
import sys

from kftrain.core import storage
from kftrain.errors import FencedError
from kftrain.launch.spec import NODE_NAME_ENV
from kftrain.process.termination import leave_message
from kftrain.run import attempts
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.error import ErrorDocument, read_error
from kftrain.worker import root_cause
from kftrain.worker.node import NodeSpec


def announce(node: NodeSpec, error: ErrorDocument, attempt: int | None) -> None:
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
        if attempt is None or attempts.last_attempt(node.paths) <= attempt:
            publish_error(node.paths.error, document)


def publish_error(uri: str, error: ErrorDocument) -> None:
    """Publish the error of a job or a node. The first one stays, unless it was only a consequence of this one."""
    try:
        storage.create_json(uri, error.to_dict())
    except FileExistsError:
        published = read_error(uri)
        if published is None or root_cause.outranks(error, published):
            storage.publish_json(uri, error.to_dict())
