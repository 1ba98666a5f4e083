"""Labels by which jobs and pods are found: ours, and those of Kueue."""

from __future__ import annotations

import re

RUN_LABEL, TASK_LABEL, KFP_RUN_LABEL = "kftrain.io/run", "kftrain.io/task", "kftrain.io/kfp-run"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"


def label_value(text: str) -> str:
    """Turn a text into a valid value of a Kubernetes label: other characters become `-`, 63 characters at most."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-_.")


def selector(label: str, value: str) -> str:
    """Build a label selector for the objects whose `label` has this value, such as the id of a run."""
    return f"{label}={label_value(value)}"
