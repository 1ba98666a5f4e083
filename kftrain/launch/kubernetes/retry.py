"""The retry policy for an API server: calls are repeated while it does not answer, or answers with what passes.

One line says that it does not answer and one that it does again, however many threads ask. Whoever is in a hurry,
because the process was told to stop, gets an error within seconds.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from kftrain.errors import LaunchError
from kftrain.progress import Progress

CALL_TIMEOUT_SECONDS = (5.0, 10.0)
"""To connect, and of silence while an answer is read: as long as that, a call cannot be interrupted."""

OUTAGE_SECONDS = 600.0
"""How long a call is repeated."""

HURRIED_SECONDS = 8.0
"""How long in a hurry: a step of a pipeline is killed 30 seconds after it was told to stop."""

SAID_AFTER_SECONDS = 2.0
"""What passes sooner is not worth a line."""

FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.5, 15.0
SLICE_SECONDS = 0.2

PASSING = frozenset((429, 500, 502, 503, 504))
"""500 too: the training operator's webhook answers with it while the operator is away."""

BROKEN_TLS = 0
"""The client's status for TLS that failed. It passes where the connection only ended, as when an API server is
restarted behind a load balancer, or where calls have succeeded before; else address or certificate are wrong."""

UNAUTHORIZED = 401
"""Passes where the credentials were accepted before: a token that is being replaced, an authenticator that is away."""

FORBIDDEN, FORBIDDEN_SECONDS = 403, 60.0
"""Passes within this time where the same call was allowed before: an API server that has just started, a webhook."""

ALLOWED = frozenset((404, 409))
"""Answers to a call that was allowed, besides success."""

MESSAGE_CHARACTERS = 500


class RetryPolicy:
    """Repeats the calls of one client."""

    def __init__(self, api_exception: type[Exception], warn: Progress) -> None:
        self.hurried: Callable[[], bool] = lambda: False
        """Whether this process was told to stop."""
        self._api_exception = api_exception
        self._warn = warn
        self._lock = threading.Lock()
        self._is_away = False
        self._allowed: set[tuple[str, str]] = set()

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls until there is an answer that stands. Raises the ApiException of it, or LaunchError after an outage."""
        return self.call_for(OUTAGE_SECONDS, method, *arguments, **options)

    def call_for(self, outage_seconds: float, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """`call` with a limit of its own; 0: it is called once."""
        import urllib3

        # Rights are given for a method and, of custom objects, for a kind; names of objects do not matter.
        kind = method.__name__, arguments[3] if len(arguments) > 3 else ""
        began, delay, failed = time.monotonic(), FIRST_DELAY_SECONDS, False
        while True:
            asked = 0.0
            try:
                answer = method(*arguments, _request_timeout=CALL_TIMEOUT_SECONDS, **options)
            except self._api_exception as error:
                if time.monotonic() - began >= self._lasting_seconds(error, kind, outage_seconds):
                    self._tell(failed)
                    raise
                problem, asked = message_of(error), retry_after_seconds(error)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                problem = type(error).__name__
            else:
                self._allowed.add(kind)
                self._tell(failed)
                return answer
            failed, away_seconds = True, time.monotonic() - began
            if away_seconds > (min(outage_seconds, HURRIED_SECONDS) if self.hurried() else outage_seconds):
                raise LaunchError(
                    f"the API server did not answer for {away_seconds:.0f} s: {problem}",
                    fix="look for the job by kftrain status, and resume the run",
                )
            if away_seconds >= SAID_AFTER_SECONDS:
                self._tell(failed, problem)
            self._sleep(max(asked, delay * random.uniform(0.5, 1.0)))
            delay = min(2 * delay, MAX_DELAY_SECONDS)

    def _lasting_seconds(self, error: Any, kind: tuple[str, str], outage_seconds: float) -> float:
        """How long the server may go on to answer so before that stands; 0: it stands."""
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
        """Sleeps, only for a moment once there is hurry."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_SECONDS))
            if self.hurried():
                return

    def _tell(self, failed: bool, problem: str = "") -> None:
        """Says once that there is a `problem`, or that it is over; a call that has never failed knows of neither."""
        if not failed:
            return
        with self._lock:
            is_news = self._is_away != bool(problem)
            self._is_away = bool(problem)
        if is_news:
            line = f"does not answer ({problem}): trying again" if problem else "answers again"
            self._warn(f"the API server {line}")


def message_of(error: Any) -> str:
    """Status and message of an ApiException, on one line."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else error.body
    try:
        message = json.loads(body)["message"]
    except (TypeError, ValueError, KeyError):
        message = body or error.reason
    return f"{error.status} {' '.join(str(message).split())[:MESSAGE_CHARACTERS]}"


def retry_after_seconds(error: Any) -> float:
    """What the server asks to wait, within reason."""
    value = (error.headers or {}).get("Retry-After") or ""
    return min(float(value), MAX_DELAY_SECONDS) if value.isdigit() else 0.0
