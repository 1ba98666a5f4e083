"""What a node leaves behind: why it failed, for all who look for it, and its logs."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from kftrain import storage
from kftrain.errors import FencedError
from kftrain.launch.spec import NODE_NAME_ENV
from kftrain.process.termination import leave_message
from kftrain.run import attempts
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.error import ErrorDocument, read_error
from kftrain.worker import root_cause
from kftrain.worker.node import NodeSpec
from kftrain.worker.output import shortened
from kftrain.worker.root_cause import Document


def announce(node: NodeSpec, error: Document, attempt: int | None) -> None:
    """Says why this node failed: on the console, to Kubernetes, in error.json; storage last, it may take its time."""
    name = os.environ.get(NODE_NAME_ENV) or socket.gethostname()
    where = {"node": name, "node_rank": node.node_rank, "pod": socket.gethostname()}
    who = f"node {name}, rank {error['rank']}" if "rank" in error else f"node {name}"
    sys.stderr.write(f"{who}: {error['line']}\n")
    document = ErrorDocument.received({**error, **where, "stage": node.task, "attempt": attempt})
    leave_message(document.line, document.exit_code, document.kind)
    if error["exit_code"] == FencedError.exit_code:  # the run is another's, and so is what it says of itself
        return
    with best_effort("error.json could not be written", REPORT_SECONDS):
        publish_error(node.paths.error, document.to_dict())


def publish_error(uri: str, error: Document) -> None:
    """Leaves the error of a job or a node. Of several the first stays, unless that one was no cause."""
    try:
        storage.create_json(uri, error)
    except FileExistsError:
        published = read_error(uri)
        if published is None or root_cause.outranks(error, published.to_dict()):
            storage.publish_json(uri, error)


def next_attempt(node: NodeSpec) -> int | None:
    """The attempt that the next claim makes of this job; an evaluation has none."""
    return attempts.last_attempt(node.paths) + 1 if node.task == "train" else None


def logs_uri(node: NodeSpec, attempt: int | None) -> str:
    """Where this node's logs go. An attempt that fails before its claim shares the folder with the next one."""
    return storage.join(node.paths.logs, "evaluation" if attempt is None else f"attempt-{attempt}")


def publish_log(path: Path, uri: str) -> None:
    """Adds a log to what is there from an earlier start."""
    with best_effort(f"{path.name} could not be published", REPORT_SECONDS):
        before = storage.read_bytes(uri) if storage.exists(uri) else b""
        storage.publish(uri, shortened(before + path.read_bytes()))
