"""Labels by which jobs and pods are found, ours and Kueue's, and annotations that launchers and people leave."""

from __future__ import annotations

import re

RUN_LABEL, TASK_LABEL, KFP_RUN_LABEL = "kftrain.io/run", "kftrain.io/task", "kftrain.io/kfp-run"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"

DIGEST_ANNOTATION = "kftrain.io/spec-digest"
"""Digest of the specification as we built it: webhooks change the stored one."""

STATE_ANNOTATION = "kftrain.io/state"
"""The state and its reasons, as the launcher prints them."""

PROGRESS_ANNOTATION = "kftrain.io/progress"
"""The last line that the job has printed about a step."""

LAUNCH_ANNOTATION = "kftrain.io/launch"
"""Mark of the launch that holds the job: a random number by which a launcher knows its own job."""

SEEN_ANNOTATION = "kftrain.io/seen"
"""Time at which a launcher last looked at the job."""

SUSPENDED_ANNOTATION = "kftrain.io/suspended"
"""Time of `kftrain suspend`; removed by `kftrain unsuspend`."""


def make_label_value(text: str) -> str:
    """Turn a text into a valid value of a Kubernetes label: other characters become `-`, 63 characters at most."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-_.")


def make_selector(label: str, value: str) -> str:
    """Build a label selector for the objects whose `label` has this value, such as the id of a run."""
    return f"{label}={make_label_value(value)}"
