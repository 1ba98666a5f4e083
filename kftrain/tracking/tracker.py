"""The tracker of a training loop: metrics go into a queue in memory, a thread brings them to MLflow.

    log_metrics ──queue──▶ thread ──▶ spool file ──▶ server
      2 µs, never blocks            appended first    in order, up to 1000 points per request, retried for ever

Every point is in the spool file before it is sent and leaves it when the server has it, so an outage of any length
costs disk space, not points, and a crash loses at most what was logged in the last second. Before the first request,
and after every failure (the request may have arrived), the thread asks for the highest step that the server has of
each metric and skips points up to it: since points arrive in order, none is there twice, not after a resume from an
earlier step either.

MLflow stores infinity as 1.8e308 and NaN as 0: such points become a tag, `nonfinite`.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kftrain.errors import TrackingError
from kftrain.tracking import client
from kftrain.tracking.base import Point, clean_metric_name, now_ms
from kftrain.tracking.spool import Spool

NONFINITE_TAG = "nonfinite"

QUEUE_LENGTH = 10_000
"""Number of steps that may wait for the thread, which falls behind only while a request hangs: a minute at most."""

FIRST_REQUEST_SECONDS = 10.0
"""Seconds of training before MLflow is imported, which takes seconds of the GIL; a short training never imports it."""

FLUSH_INTERVAL_SECONDS = 1.0
LAST_LOOK_SECONDS = 0.5
"""Seconds that `close` leaves the thread at least, to put what it has into the spool and to end a request."""

MAX_BACKOFF_SECONDS = 30.0
POINTS_PER_REQUEST = 1000

_logger = logging.getLogger(__name__)

Send = Callable[[list[Point], dict[str, str]], None]
"""Function that records points and sets tags. Raises TrackingError."""

HighestSteps = Callable[[], dict[str, int]]
"""Function that returns metric name -> highest step that is recorded. Raises TrackingError."""

_Item = tuple[dict[str, float], int, int]  # metrics, step, milliseconds since 1970


class MlflowTracker:
    """A tracker with a thread of its own, see the module.

    `num_dropped` counts points that were lost because the queue or the disk was full.
    """

    def __init__(
        self, send: Send, highest_steps: HighestSteps, spool: Path, first_request_seconds: float = 0.0
    ) -> None:
        self._send = send
        self._highest_steps = highest_steps
        self._spool = Spool(spool)
        self._queue: queue.Queue[_Item | None] = queue.Queue(QUEUE_LENGTH)
        self._recorded: dict[str, int] | None = None
        self._nonfinite: dict[str, str] = {}
        self._backoff_seconds = 0.0
        self._next_attempt = time.monotonic() + first_request_seconds
        self._deadline = math.inf
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="kftrain-tracker", daemon=True)
        self._thread.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the metrics of a step. Never blocks, never raises."""
        try:
            self._queue.put_nowait((dict(metrics), step, now_ms()))
        except queue.Full:
            self.num_dropped += len(metrics)

    def close(self, timeout_seconds: float) -> None:
        """Wait until the server has everything, at most this long; the rest stays in the spool.

        With 0 no request is begun that is not under way.
        """
        self._deadline = time.monotonic() + timeout_seconds
        try:
            self._queue.put(None, timeout=max(LAST_LOOK_SECONDS, timeout_seconds))
        except queue.Full:
            _logger.warning("tracking is stuck; metrics that were not sent yet are lost")
        self._thread.join(max(LAST_LOOK_SECONDS, self._deadline - time.monotonic()))
        if self.num_dropped:
            _logger.warning("%d metric values were lost: tracking could not keep up", self.num_dropped)

    def _run(self) -> None:
        closing = False
        while not closing:
            items, closing = self._collect()
            self._store([point for item in items for point in self._points(item)])
            self._deliver(patient=True)
        while not self._spool.empty and time.monotonic() < self._deadline:
            self._deliver(patient=False)
            if not self._spool.empty:
                time.sleep(min(self._backoff_seconds, max(0.0, self._deadline - time.monotonic())))

    def _collect(self) -> tuple[list[_Item], bool]:
        """Wait for the flush interval and return what was logged, and True if the tracker is closing."""
        items: list[_Item] = []
        until = time.monotonic() + FLUSH_INTERVAL_SECONDS
        while len(items) < POINTS_PER_REQUEST:
            try:
                item = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return items, False
            if item is None:
                return items, True
            items.append(item)
        return items, False

    def _points(self, item: _Item) -> list[Point]:
        metrics, step, timestamp_ms = item
        points = []
        for name, value in metrics.items():
            try:
                points.append(Point(clean_metric_name(name), float(value), step, timestamp_ms))
            except (TypeError, ValueError):
                self.num_dropped += 1
        return points

    def _store(self, points: list[Point]) -> None:
        """Put points into the spool; if the disk is full, send them straight to the server, or drop them."""
        if not points:
            return
        try:
            self._spool.append(points)
        except OSError:
            try:
                self._transmit(points)
            except TrackingError:
                self._recorded = None
                self.num_dropped += len(points)

    def _deliver(self, patient: bool) -> None:
        """Send the points in the spool until it is empty or the server fails.

        `patient`: do nothing before the time of the next attempt.
        """
        if patient and time.monotonic() < self._next_attempt:
            return
        while not self._spool.empty:
            try:
                points, num_bytes = self._spool.peek(POINTS_PER_REQUEST)
                self._transmit(points)
                self._spool.take(num_bytes)
            except (TrackingError, OSError) as error:
                self._postpone(error)
                return
            self._backoff_seconds = 0.0

    def _transmit(self, points: list[Point]) -> None:
        """Send the points that the server does not have. Raises TrackingError."""
        if self._recorded is None:
            self._recorded = self._highest_steps()
        new = []
        for point in points:
            if point.step > self._recorded.get(point.key, -1):
                new.append(point)
                self._recorded[point.key] = point.step
        try:
            self._send([point for point in new if math.isfinite(point.value)], self._nonfinite_tags(new))
        except TrackingError:
            self._recorded = None  # the request may have arrived: ask the server again before the next one
            raise

    def _nonfinite_tags(self, points: list[Point]) -> dict[str, str]:
        """Return the tag that names the first non-finite value of every metric; empty if no metric is new to it."""
        # Reversed: of several points of a metric the first one is written last, and stays.
        first = {p.key: f"{p.key}={p.value} at step {p.step}" for p in reversed(points) if not math.isfinite(p.value)}
        if first.keys() <= self._nonfinite.keys():
            return {}
        self._nonfinite = {**first, **self._nonfinite}
        return {NONFINITE_TAG: "; ".join(sorted(self._nonfinite.values()))}

    def _postpone(self, error: Exception) -> None:
        if not self._backoff_seconds:
            _logger.warning("metrics are kept on disk until MLflow takes them: %s", error)
        self._backoff_seconds = min(MAX_BACKOFF_SECONDS, max(0.5, 2 * self._backoff_seconds))
        self._next_attempt = time.monotonic() + self._backoff_seconds


def open_tracker(uri: str, mlflow_run_id: str, spool: Path) -> MlflowTracker:
    """Start a tracker for a run that `start_run` returned. `spool`: a file of this run alone.

    Points that an earlier process left in the spool are sent first. Returns at once, whether MLflow can be reached or
    not. Raises TrackingError if the spool cannot be written.
    """

    def send(points: list[Point], tags: dict[str, str]) -> None:
        if points:
            client.log_points(uri, mlflow_run_id, points)
        if tags:
            client.set_tags(uri, mlflow_run_id, tags)

    def highest_steps() -> dict[str, int]:
        return {key: point.step for key, point in client.read_run(uri, mlflow_run_id).latest.items()}

    return MlflowTracker(send, highest_steps, spool, FIRST_REQUEST_SECONDS)
