"""Terminate, seen before it strikes.

Kubeflow answers *Terminate* by marking the Workflow; Argo looks at it some 10 s later and then kills the step's pod
within milliseconds, too soon for a handler of SIGTERM to delete a job. The exit handler deletes it afterwards, but not
in a run that was retried. So a launcher looks at the mark itself, and deletes its job while it still can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

POLL_SECONDS = 2.0


class WorkflowReader(Protocol):
    """The call to the cluster that `TerminateWatch` needs; `Cluster` has it."""

    def read_workflow(self, name: str, retried: bool = True) -> dict[str, Any] | None:
        """Return a Workflow; None where it is gone or cannot be read. Only `retried` waits out an outage."""
        ...


def is_terminated(workflow: Mapping[str, Any]) -> bool:
    """Tell whether somebody pressed Terminate: Kubeflow then sets the deadline of the Workflow to 0."""
    return (workflow.get("spec") or {}).get("activeDeadlineSeconds") == 0


class TerminateWatch:
    """Context manager that watches the Workflow in a thread and calls `on_terminate` there once it is terminated.

    Args:
        cluster: Where the Workflow is.
        owner: The reference to it, of which nothing but the name counts; None outside a pipeline: nothing happens.
        on_terminate: Called once at most.
    """

    def __init__(
        self, cluster: WorkflowReader, owner: Mapping[str, Any] | None, on_terminate: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._name = str(owner["name"]) if owner else ""
        self._on_terminate = on_terminate
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="terminate-watch")

    def __enter__(self) -> TerminateWatch:
        if self._name:
            self._thread.start()
        return self

    def __exit__(self, *caught: object) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            workflow = self._cluster.read_workflow(self._name, retried=False)
            if workflow is not None and is_terminated(workflow) and not self._closed.is_set():
                self._on_terminate()
                return
            self._closed.wait(POLL_SECONDS)
