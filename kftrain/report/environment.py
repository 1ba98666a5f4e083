"""Where and with what a page was written: the only part of a report that does not follow from its documents."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from datetime import datetime, timezone

from kftrain import __version__
from kftrain.report.content import Fact

COMMIT_ENV = "KFTRAIN_GIT_COMMIT"


def facts() -> list[Fact]:
    """Date, host, versions, commit, as far as they are known here; torch is not where steps run."""
    found = [
        Fact("Written", datetime.now(timezone.utc).isoformat(" ", "minutes").replace("+00:00", " UTC")),
        Fact("Host", socket.gethostname(), code=True),
        Fact("kftrain", __version__),
        Fact("Python", platform.python_version()),
        Fact("torch", _version("torch")),
        Fact("Commit", os.environ.get(COMMIT_ENV, ""), code=True),
    ]
    return [fact for fact in found if fact.value]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
