"""What a report says, apart from how it looks: sections of sentences, figures, charts and tables.

A stage's report is built once as `Section`s and then written twice, as HTML (`page.py`) and as Markdown
(`markdown.py`), so that the two cannot disagree. All strings are plain text, unescaped; only a chart's
drawing is markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kftrain.report.wording import clean, count, short


@dataclass(frozen=True)
class Fact:
    """A name with a short value: a key figure, or a line of provenance."""

    name: str
    value: str
    note: str = ""
    """Said below the value, in small type."""
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
    """Takes the whole width of the page also where two charts would fit side by side."""


@dataclass(frozen=True)
class Sample:
    """One sample of the data with what the model says of it."""

    name: str
    facts: Sequence[Fact]
    picture: str = ""
    """A PNG in base64, and nothing else."""


@dataclass(frozen=True)
class Gallery:
    """Samples beside each other."""

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


def sample_facts(texts: Mapping[str, str], names: Sequence[str] = ()) -> list[Fact]:
    """What a task shows of a sample, in the order of `names`: code and the like as it is set, without empty pages."""
    ordered = {name: clean(texts[name]) for name in (*names, *texts) if name in texts}
    is_set = any(re.search(r"\n|  ", text) for text in ordered.values())
    return [Fact(clean(name), _without_pages(text), code=is_set) for name, text in ordered.items()]


def _without_pages(text: str) -> str:
    if text and not text.strip():
        return f"({count(len(text))} \u00d7 white space)"
    text = re.sub(r"[ \t]*\n(?:[ \t]*\n)+", "\n\n", text.strip("\n"))
    return re.sub(r"[ \t]{13,}", " " * 12, text)


def digest(name: str, value: str) -> Fact:
    """A digest, shortened to what the eye can compare."""
    return Fact(name, short(value), full=value, code=True)


def uri(name: str, value: str) -> Fact:
    """Where something lies, in full."""
    return Fact(name, value, code=True)
