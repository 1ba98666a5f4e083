"""The parts of a report, apart from their looks: sections of sentences, figures, charts and tables.

A stage's report is built once as a `ReportSection` and then written twice, as HTML (`page.py`) and as Markdown
(`markdown.py`), so that the two cannot disagree. All strings are plain text, unescaped; only a chart's
drawing is markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kftrain.reports.wording import clean, format_count, shorten_digest


@dataclass(frozen=True)
class Fact:
    """A name with a short value: a key figure, or a line of provenance."""

    name: str
    value: str
    note: str = ""
    """Remark below the value, in small type."""
    full: str = ""
    """The unabridged value, where `value` is shortened; shown on hovering."""
    code: bool = False
    """An identifier: fixed-width type, broken anywhere."""


@dataclass(frozen=True)
class Table:
    """Text in the first column, figures aligned right in the others."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Chart:
    """A drawing under its title, and its figures as a table for where there are no drawings."""

    title: str
    drawing: Markup
    note: str = ""
    table: Table | None = None
    wide: bool = False
    """True: the chart takes the whole width of the page even if two would fit side by side."""


@dataclass(frozen=True)
class Sample:
    """A sample of the data with the model's answer to it."""

    name: str
    facts: Sequence[Fact]
    picture: str = ""
    """A PNG in base64, and nothing else."""


@dataclass(frozen=True)
class Gallery:
    """Samples that a page shows side by side."""

    title: str
    samples: Sequence[Sample]


@dataclass(frozen=True)
class ReportSection:
    """The report of one stage."""

    title: str
    headline: str
    """The result in one sentence."""
    tone: str = "neutral"
    """`good`, `bad` or `neutral`."""
    sentences: Sequence[str] = ()
    figures: Sequence[Fact] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    galleries: Sequence[Gallery] = ()
    command: str = ""
    """A command to run next."""
    log: Sequence[str] = ()
    """The last lines of a log."""
    facts: Sequence[Fact] = ()
    """Provenance: what exactly this is a report of."""


def make_sample_facts(texts: Mapping[str, str], names: Sequence[str] = ()) -> list[Fact]:
    """Turn a sample's texts into facts in the order of `names`; code keeps its layout, blank pages are dropped."""
    ordered = {name: clean(texts[name]) for name in (*names, *texts) if name in texts}
    is_set = any(re.search(r"\n|  ", text) for text in ordered.values())
    return [Fact(clean(name), _drop_empty_pages(text), code=is_set) for name, text in ordered.items()]


def _drop_empty_pages(text: str) -> str:
    if text and not text.strip():
        return f"({format_count(len(text))} \u00d7 white space)"
    text = re.sub(r"[ \t]*\n(?:[ \t]*\n)+", "\n\n", text.strip("\n"))
    return re.sub(r"[ \t]{13,}", " " * 12, text)


def make_digest_fact(name: str, value: str) -> Fact:
    """Return a fact with a digest that is shortened to what the eye can compare."""
    return Fact(name, shorten_digest(value), full=value, code=True)


def make_uri_fact(name: str, value: str) -> Fact:
    """Return a fact with an unabridged URI."""
    return Fact(name, value, code=True)
