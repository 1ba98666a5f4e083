"""Sections as one HTML page that needs nothing but itself: no script, no address, styles inline.

It is shown in a sandboxed frame of about 500 pixels and opened as a file, in light and in dark. Everything
is escaped by the template engine after `wording.clean`; the page also forbids itself to load anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from kftrain import __version__
from kftrain.report.content import Fact, ReportSection
from kftrain.report.wording import clean


@dataclass(frozen=True)
class Page:
    """A page of sections."""

    eyebrow: str
    """What it is a report of, above the headline."""
    headline: str
    sections: Sequence[ReportSection]
    tone: str = "neutral"
    lead: str = ""
    figures: Sequence[Fact] = ()
    facts: Sequence[Fact] = ()
    """Provenance of the whole page, at its end."""
    config_yaml: str = ""
    """The configuration, folded away."""


def single(section: ReportSection, subject: str, config_yaml: str = "") -> Page:
    """A page with one section, whose headline is the page's."""
    return Page(
        f"{section.title} \u00b7 {subject}",
        section.headline,
        [section],
        section.tone,
        config_yaml=config_yaml,
    )


def render(page: Page) -> str:
    """The page as an HTML document that is well-formed XML as well."""
    return (
        _environment().get_template("page.html").render(page=page, single=len(page.sections) == 1, version=__version__)
    )


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("kftrain.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _cleaned(value: Any) -> Any:
    return value if isinstance(value, Markup) else clean(value)
