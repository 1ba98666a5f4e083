"""Sections as one HTML page that needs nothing but itself: no script, no address, styles inline.

Kubeflow shows a page in a sandboxed frame of about 500 pixels, people open it as a file, in light and in dark.
Everything is escaped by the template engine after `wording.clean`; the page also forbids itself to load anything.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from kftrain import __version__
from kftrain.reports.content import Fact, ReportSection
from kftrain.reports.wording import clean

COMMIT_ENV = "KFTRAIN_GIT_COMMIT"


@dataclass(frozen=True)
class Page:
    """Sections under one headline, with key figures and provenance."""

    eyebrow: str
    """Subject of the report, above the headline."""
    headline: str
    sections: Sequence[ReportSection]
    tone: str = "neutral"
    lead: str = ""
    figures: Sequence[Fact] = ()
    facts: Sequence[Fact] = ()
    """Provenance of the whole page, at its end."""
    config_yaml: str = ""
    """Configuration of the run, folded away."""


def render_section(section: ReportSection, subject: str, config_yaml: str = "") -> str:
    """Return one section as an HTML page whose headline is the section's; `subject` stands above it."""
    eyebrow = f"{section.title} \u00b7 {subject}"
    return render_page(Page(eyebrow, section.headline, [section], section.tone, config_yaml=config_yaml))


def render_page(page: Page) -> str:
    """Return the page as an HTML document that is also well-formed XML."""
    return (
        _make_environment()
        .get_template("page.html")
        .render(page=page, single=len(page.sections) == 1, version=__version__)
    )


@cache
def _make_environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("kftrain.reports", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_clean_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _clean_value(value: Any) -> Any:
    return value if isinstance(value, Markup) else clean(value)


def describe_environment() -> list[Fact]:
    """Return date, host, versions and commit; what this machine does not know is left out (steps have no torch)."""
    facts = [
        Fact("Written", datetime.now(timezone.utc).isoformat(" ", "minutes").replace("+00:00", " UTC")),
        Fact("Host", socket.gethostname(), code=True),
        Fact("kftrain", __version__),
        Fact("Python", platform.python_version()),
        Fact("torch", _find_version("torch")),
        Fact("Commit", os.environ.get(COMMIT_ENV, ""), code=True),
    ]
    return [fact for fact in facts if fact.value]


def _find_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
