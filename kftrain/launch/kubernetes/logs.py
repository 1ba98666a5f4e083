"""The logs of a job's pods, on one stream: followed across restarts, connected again by time, every line once.

Memory is bounded: `Cluster` cuts a line at 16 KiB, of each worker the last lines are kept. So is the rate of what a
launcher shows: what a worker prints beyond 200 lines in a second is counted; the complete logs lie in the run's folder.
Who asks for the logs themselves gets all of them.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime

from kftrain.core.progress import STEP, strip_mark, to_log
from kftrain.errors import KftrainError
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.observation import Pod, format_place
from kftrain.launch.spec import WORKER
from kftrain.process.output import MAX_WAITING_CHARACTERS, Console

FIRST = format_place(WORKER, 0)
"""Place of the pod that prints the lines about steps."""

RECONNECT_SECONDS = 1.0
MAX_LINES_PER_SECOND = 200
TAIL_LINES = 40
JOIN_SECONDS = 5.0
"""Seconds for which `finish` waits for the ends of logs."""

SLICE_SECONDS = 0.05
"""Seconds of one slice of that wait: counted in slices, so that a machine that pauses loses no lines."""

NOTE = "… {} lines left out: nobody read them here"

DRAIN_SECONDS = 60.0
"""Seconds for which `drain` follows a pod that goes on to print: longer than the grace of a pod."""

MAX_BROKEN = 5
"""Connections in a row that may break without a line before the log of a pod that has ended is given up."""

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
"""RFC 3339, in the time zone of the node; the kubelet trims zeros at the end of the fraction."""


class Logs:
    """Follows the logs of the pods of one job, each in a thread, and writes their lines to one stream."""

    def __init__(
        self,
        source: JobClient,
        num_pods: int,
        write: Callable[[str], None] | None = None,
        follow: bool = True,
        limited: bool = True,
    ) -> None:
        self._source = source
        self._prefixed = num_pods > 1
        self._follow = follow
        write = write or _write_to_stdout
        limit = MAX_WAITING_CHARACTERS if limited else None
        self._console = Console(lambda lines: [write(line) for line in lines], limit, NOTE)
        self._limited = limited
        self._drained_at = float("inf")
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._closed = threading.Event()
        self._tails: dict[str, deque[str]] = {}
        """Place of a pod -> its last lines."""
        self.progress = ""
        """The last line about a step, without its mark."""
        self.step = 0
        """The last step that the present attempt has shown."""
        self.target_step = 0

    def follow(self, pods: Sequence[Pod]) -> None:
        """Start to follow each pod that has a log and is not followed yet. A successor's tail begins empty."""
        for pod in pods:
            if not pod.has_log or pod.uid in self._threads:
                continue
            with self._lock:
                self._tails[pod.place] = deque(maxlen=TAIL_LINES)
                if pod.place == FIRST:
                    self.step = 0
            thread = threading.Thread(target=self._run, args=(pod,), daemon=True, name=f"log of {pod.name}")
            self._threads[pod.uid] = thread
            thread.start()

    def finish(self, uids: Collection[str] | None = None) -> None:
        """Wait up to `JOIN_SECONDS` for the ends of the logs of these pods, or of all pods."""
        reading = [thread for uid, thread in self._threads.items() if uids is None or uid in uids]
        left = round(JOIN_SECONDS / SLICE_SECONDS)
        while left > 0 and (alive := next((thread for thread in reading if thread.is_alive()), None)):
            alive.join(timeout=SLICE_SECONDS)
            left -= 1
        while left > 0 and not self._console.flush(SLICE_SECONDS):
            left -= 1

    def close(self, wait: bool = True) -> None:
        """Let no log be connected again; with `wait`, give the ends of the logs a moment first."""
        self._closed.set()
        if wait:
            self.finish()

    def drain(self) -> None:
        """Wait for all that the pods have printed so far, however long that takes.

        Raises BrokenPipeError where nobody reads what is written.
        """
        self._follow = False
        self._drained_at = time.monotonic()
        for thread in self._threads.values():
            while thread.is_alive() and not self.is_broken:
                thread.join(timeout=JOIN_SECONDS)
        self._console.flush(JOIN_SECONDS)
        if self._console.broken is not None:
            raise self._console.broken

    @property
    def is_broken(self) -> bool:
        """True once nobody reads the lines that are written."""
        return self._console.broken is not None

    def copy_tails(self) -> dict[str, list[str]]:
        """Return the last lines of each pod, by its place."""
        with self._lock:
            return {place: list(lines) for place, lines in self._tails.items()}

    def _run(self, pod: Pod) -> None:
        try:
            self._read_to_end(pod)
        except KftrainError as error:
            if not self._closed.is_set():
                to_log(f"warning: the log of {pod.name} is no longer shown: {error.line}")
        except BrokenPipeError:  # as the console knows
            pass

    def _read_to_end(self, pod: Pod) -> None:
        """Read a pod's log, over several connections, until its container has ended and one held to the end."""
        gauge, place, num_broken = _Gauge(), _Place(), 0
        while not self._closed.is_set() and num_broken < MAX_BROKEN:
            follow, item = self._follow, self._source.read_pod(pod.name)  # before the log: it may end in between
            if item is None or item["metadata"]["uid"] != pod.uid:
                break
            ended = item.get("status", {}).get("phase") in ("Succeeded", "Failed") or not follow
            since = place.since
            is_whole = self._read_once(pod, place, gauge, follow, ended)
            if ended and is_whole:
                break
            num_broken = num_broken + 1 if ended and place.since == since else 0
            self._closed.wait(RECONNECT_SECONDS)
        if num_broken == MAX_BROKEN:
            to_log(f"warning: the log of {pod.name} breaks off: its node does not send the rest")
        self._say_left_out(pod, gauge.take_left_out())

    def _read_once(self, pod: Pod, place: _Place, gauge: _Gauge, follow: bool, ended: bool) -> bool:
        """Take the lines of one connection; return whether the connection held until the end of the log."""
        place.resume()
        try:
            for raw in self._lines(pod, place.since, follow):
                if raw.endswith(b"\n") or ended:  # a torn line comes again, whole
                    line = place.pass_by(raw.decode(errors="replace").rstrip("\n"))
                    if line is not None:
                        self._take(pod, line, gauge)
        except BrokenPipeError:  # not that of the cluster: nobody reads what is written
            raise
        except ConnectionError:
            return False
        return True

    def _lines(self, pod: Pod, since: str, follow: bool) -> Iterator[bytes]:
        """Yield the lines that one connection gives of the pod's log.

        The API server finds a log by the pod's name, and a successor may take that name. So the pod is read again once
        the first line is there: if it still has its uid then, the log is its own.
        """
        is_known = False
        for raw in self._source.read_log_lines(pod.name, since, follow):
            item = None if is_known else self._source.read_pod(pod.name)
            if item is not None and item["metadata"]["uid"] != pod.uid:
                return
            is_known = True
            yield raw
            if follow and time.monotonic() - self._drained_at > DRAIN_SECONDS:
                return

    def _take(self, pod: Pod, line: str, gauge: _Gauge) -> None:
        """Keep a line in the pod's tail, note its step, and show it; lines about steps are shown at any rate."""
        text = strip_mark(line)
        step = STEP.search(text) if text is not None else None
        with self._lock:
            self._tails[pod.place].append(line)
            if text is not None and step is not None:
                self.step = int(step[1])
                self.target_step = int(step[2])
                self.progress = text
        if not gauge.is_same_second(time.monotonic()):
            self._say_left_out(pod, gauge.take_left_out())
        if not self._limited or gauge.admits() or step is not None:
            self._console.show([self._prefix(pod) + line])

    def _say_left_out(self, pod: Pod, count: int) -> None:
        if count:
            line = f"… {count} lines left out; the complete log is in the run's folder"
            self._console.show([self._prefix(pod) + line])

    def _prefix(self, pod: Pod) -> str:
        return f"{pod.place}: " if self._prefixed else ""


class _Place:
    """The place up to which a log was read. `sinceTime` is inclusive, and many lines may bear the same nanosecond."""

    def __init__(self) -> None:
        self.since = ""
        """Time of the newest line so far, as the log has it."""
        self._newest: tuple[int, int] = (0, 0)
        self._num_newest = 0
        self._num_to_skip = 0
        self._resuming = False

    def resume(self) -> None:
        """Prepare to read the log again from `since` on, and to pass over the lines of that time that were read."""
        self._resuming = True
        self._num_to_skip = self._num_newest

    def pass_by(self, raw: str) -> str | None:
        """Return a line without its time; None if it was read before, or is the kubelet's and not the container's."""
        stamp, _, line = raw.partition(" ")
        time_ = parse_moment(stamp)
        if time_ is None:
            return None
        if self._resuming and (time_ < self._newest or (time_ == self._newest and self._num_to_skip)):
            self._num_to_skip -= time_ == self._newest
            return None
        self._resuming = False
        if time_ > self._newest:
            self.since = stamp
            self._newest = time_
            self._num_newest = 1
        elif time_ == self._newest:
            self._num_newest += 1
        return line


class _Gauge:
    """Counts the lines of the present second."""

    def __init__(self) -> None:
        self._second = float("-inf")
        self._count = 0

    def is_same_second(self, now: float) -> bool:
        """Tell whether `now` is in the second that is counted; else begin a new one: take what was left out."""
        if now - self._second < 1.0:
            return True
        self._second = now
        return False

    def take_left_out(self) -> int:
        """Return the number of lines that were not shown since the last call, and begin the count anew."""
        left_out = max(0, self._count - MAX_LINES_PER_SECOND)
        self._count = 0
        return left_out

    def admits(self) -> bool:
        """Count one more line; return whether it may be shown."""
        self._count += 1
        return self._count <= MAX_LINES_PER_SECOND


def parse_moment(stamp: str) -> tuple[int, int] | None:
    """Return a time of the kubelet as seconds since the epoch and nanoseconds; None where the text is no such time."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return None
    second = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00"))
    return int(second.timestamp()), int(f"{match[2] or '0':0<9}")


def _write_to_stdout(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
