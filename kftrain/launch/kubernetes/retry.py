"""The retry policy for an API server: calls are repeated while it does not answer, or answers with what passes.

One line says that it does not answer and one that it does again, however many threads ask. Whoever is in a hurry,
because the process was told to stop, gets an error within seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from kftrain.core import outages
from kftrain.core.outages import OutageNews, iterate_pauses
from kftrain.core.progress import Progress
from kftrain.errors import LaunchError

CALL_TIMEOUT_SECONDS = (5.0, 10.0)
"""Seconds to connect, and of silence while an answer is read; a call cannot be interrupted for that long."""

OUTAGE_SECONDS = 600.0
"""Seconds for which a call is repeated during an outage."""

HURRIED_SECONDS = 8.0
"""The same in a hurry, in seconds: a step of a pipeline is killed 30 seconds after it was told to stop."""

SLICE_SECONDS = 0.2
API_SERVER = "the API server"

PASSING = frozenset((429, 500, 502, 503, 504))
"""Statuses that pass. 500 too: the training operator's webhook answers with it while the operator is away."""

BROKEN_TLS = 0
"""The client's status for TLS that failed. It passes where the connection only ended, as when an API server is
restarted behind a load balancer, or where calls have succeeded before; else address or certificate are wrong."""

UNAUTHORIZED = 401
"""Status that passes if the credentials worked before: a token is being replaced, or an authenticator is away."""

FORBIDDEN, FORBIDDEN_SECONDS = 403, 60.0
"""Status that passes within this time if the call was allowed before: an API server or a webhook has just started."""

ALLOWED = frozenset((404, 409))
"""Statuses, besides success, that prove that a call was allowed."""

MESSAGE_CHARACTERS = 500


class RetryPolicy:
    """Repeats the calls of one client while the API server is away, and tells of an outage once."""

    def __init__(self, api_exception: type[Exception], warn: Progress) -> None:
        self.hurried: Callable[[], bool] = lambda: False
        """Tells whether this process was told to stop; read in every attempt, also while one sleeps."""
        self._api_exception = api_exception
        self._news = OutageNews(warn)
        self._allowed: set[tuple[str, str]] = set()  # no lock: threads only add to it and look things up

    def call(
        self, method: Callable[..., Any], *arguments: Any, outage_seconds: float | None = None, **options: Any
    ) -> Any:
        """Call until an answer stands, and return it. Raises its ApiException, or LaunchError after an outage.

        `outage_seconds`: how long it is repeated at most; 0: it is called once; None: as any call that matters.
        """
        import urllib3

        outage_seconds = OUTAGE_SECONDS if outage_seconds is None else outage_seconds
        # Rights are given for a method and, of custom objects, for a kind; names of objects do not matter.
        kind = method.__name__, arguments[3] if len(arguments) > 3 else ""
        began, pauses, has_failed = time.monotonic(), iterate_pauses(), False
        while True:
            requested_seconds = 0.0
            try:
                answer = method(*arguments, _request_timeout=CALL_TIMEOUT_SECONDS, **options)
            except self._api_exception as error:
                if time.monotonic() - began >= self._lasting_seconds(error, kind, outage_seconds):
                    self._note_answer(has_failed)
                    raise
                problem, requested_seconds = format_message(error), read_retry_after_seconds(error)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                problem = type(error).__name__
            else:
                self._allowed.add(kind)
                self._note_answer(has_failed)
                return answer
            has_failed, away_seconds = True, time.monotonic() - began
            if away_seconds > (min(outage_seconds, HURRIED_SECONDS) if self.hurried() else outage_seconds):
                raise LaunchError(
                    f"the API server did not answer for {away_seconds:.0f} s: {problem}",
                    fix="look for the job by kftrain status, and resume the run",
                )
            if away_seconds >= outages.SAID_AFTER_SECONDS:
                self._news.tell(API_SERVER, problem)
            self._sleep(max(requested_seconds, next(pauses)))

    def _note_answer(self, has_failed: bool) -> None:
        """Tell that the API server is back, if this call had failed: others may not have met the problem."""
        if has_failed:
            self._news.tell(API_SERVER)

    def _lasting_seconds(self, error: Any, kind: tuple[str, str], outage_seconds: float) -> float:
        """Return for how many seconds an error may still pass; 0 if it stands, infinite while the outage may last."""
        if error.status in ALLOWED:
            self._allowed.add(kind)
        if error.status == BROKEN_TLS:
            passes = bool(self._allowed) or "EOF" in str(error.reason)
        elif error.status == UNAUTHORIZED:
            passes = bool(self._allowed)
        elif error.status == FORBIDDEN:
            return FORBIDDEN_SECONDS if kind in self._allowed and outage_seconds >= FORBIDDEN_SECONDS else 0.0
        else:
            passes = error.status in PASSING
        return float("inf") if passes else 0.0

    def _sleep(self, seconds: float) -> None:
        """Sleep, in slices, and wake up at once when this process is told to stop."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_SECONDS))
            if self.hurried():
                return


def format_message(error: Any) -> str:
    """Format the status and the message of an ApiException, on one line."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body
    try:
        message = json.loads(body)["message"]
    except (TypeError, ValueError, KeyError):
        message = body or error.reason
    return f"{error.status} {' '.join(str(message).split())[:MESSAGE_CHARACTERS]}"


def read_retry_after_seconds(error: Any) -> float:
    """Return the seconds of an error's Retry-After header, `outages.MAX_DELAY_SECONDS` at most; 0 without one."""
    value = (error.headers or {}).get("Retry-After") or ""
    return min(float(value), outages.MAX_DELAY_SECONDS) if value.isdigit() else 0.0
