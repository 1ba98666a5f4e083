"""The progress of a training in `status.trainerStatus` of its TrainJob, where Kubeflow Trainer asks for it.

With its feature gate TrainJobStatus Trainer tells pods where to send it, in their environment. A training neither waits
for that nor fails by it: a thread sends the newest status, at most one in `PAUSE_SECONDS`.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
import urllib.request
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kftrain.core.progress import to_log

URL_ENV = "KUBEFLOW_TRAINER_SERVER_URL"
CERTIFICATE_ENV = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_ENV = "KUBEFLOW_TRAINER_SERVER_TOKEN"
"""Names of the variables that Trainer sets: an address, and the paths of two files."""

PAUSE_SECONDS = 5.0
"""Seconds between two of them, as Trainer's documentation asks for."""

REQUEST_SECONDS = 5.0
MAX_METRICS = 256
MAX_CHARACTERS = 64
MAX_SECONDS = 2**31 - 1
"""Limits of a TrainJob's definition: number of metrics, length of a name, seconds that are left."""


def build_status(
    step: int, num_steps: int, remaining_seconds: float, metrics: Mapping[str, float], now: datetime
) -> dict[str, Any]:
    """Build the status of a training after `step` of `num_steps`."""
    named = [(name[:MAX_CHARACTERS], f"{value:.6g}") for name, value in metrics.items() if name]
    return {
        "trainerStatus": {
            "progressPercentage": 100 * step // num_steps,
            "estimatedRemainingSeconds": min(round(remaining_seconds), MAX_SECONDS),
            "metrics": [{"name": name, "value": value} for name, value in named[:MAX_METRICS]],
            "lastUpdatedTime": now.isoformat(timespec="seconds"),
        }
    }


class TrainerStatus:
    """Sends the newest status of a training."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = [environment.get(name, "") for name in (URL_ENV, CERTIFICATE_ENV, TOKEN_ENV)]
        self._has_warned = False
        self._newest: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def report(self, step: int, num_steps: int, remaining_seconds: float, metrics: Mapping[str, float]) -> None:
        """Take the status after a step, to be sent soon; do nothing where nobody asks for it."""
        if not all(self._address):
            return
        with self._changed:
            self._newest = build_status(step, num_steps, remaining_seconds, metrics, datetime.now(timezone.utc))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_newest, daemon=True, name="trainer status")
            self._thread.start()

    def _send_newest(self) -> None:
        """Send what is newest, for ever; the last one, with 100 %, does not wait for its turn."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None)
                status, self._newest = self._newest, None
            try:
                self._send(status)
            except (OSError, http.client.HTTPException, ValueError) as error:  # next time the manager may answer again
                if not self._has_warned:
                    to_log(f"warning: the TrainJob's status could not be sent: {error}")
                self._has_warned = True
            with self._changed:
                self._changed.wait_for(self._is_last, timeout=PAUSE_SECONDS)

    def _is_last(self) -> bool:
        return self._newest is not None and self._newest["trainerStatus"]["progressPercentage"] == 100

    def _send(self, status: dict[str, Any] | None) -> None:
        url, certificate, token_file = self._address
        token = Path(token_file).read_text().strip()  # each time: it is replaced while a training runs
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(status).encode(), headers, method="POST")
        context = ssl.create_default_context(cafile=certificate)
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS, context=context):
            pass
