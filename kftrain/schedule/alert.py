"""Alerts: one line and a link, to a webhook whose URL is a secret.

The URL comes from the secret `kftrain-alert` and is shown nowhere. An alert that cannot be sent is a warning.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from kftrain.core.progress import Progress

URL_ENV = "KFTRAIN_ALERT_URL"
"""Key of the secret `kftrain-alert`, and the variable that it becomes."""

TIMEOUT_SECONDS = 10.0


def send(line: str, link: str, over_http: bool, progress: Progress) -> bool:
    """Send `{"text": "<line> <link>"}`, as Slack, Mattermost and Google Chat take it; False where nothing was sent."""
    url = os.environ.get(URL_ENV, "").strip()
    if not url:
        return False
    why = _explain_unusable(url, over_http) or _post(url, json.dumps({"text": f"{line} {link}".strip()}).encode())
    if why:
        progress(f"warning: no alert was sent: {why}")
    return not why


def _explain_unusable(url: str, over_http: bool) -> str:
    """Explain why the URL cannot be used; empty where it can. Never name it: whoever has it can write there."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in (("https", "http") if over_http else ("https",)) and parts.hostname:
            return ""
    return f"{URL_ENV} is no https URL; http needs schedule.alert_over_http"


def _post(url: str, content: bytes) -> str:
    """Post the content; return why that failed, or an empty text."""
    headers = {"Content-Type": "application/json", "User-Agent": "kftrain"}
    try:
        request = urllib.request.Request(url, content, headers)
        with urllib.request.build_opener(_NoRedirects()).open(request, timeout=TIMEOUT_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"the webhook answered {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:  # their words may contain the URL
        return f"the webhook cannot be reached ({type(error).__name__})"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: the URL is a secret, and what it points at is trusted no further."""

    def redirect_request(self, *arguments: Any) -> None:
        """Return None, so that urllib raises the redirect as an error."""
