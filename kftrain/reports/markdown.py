"""Sections as Markdown: no raw HTML, and nothing in foreign text that Markdown would act on.

Text is escaped with backslashes, which every renderer of the field honours also in tables; identifiers are
code spans, whose backticks and newlines are replaced since nothing can be escaped in them. Identifiers
stand in lists, never in tables, where a pipe in a code span would part a cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kftrain.reports.content import Fact, Gallery, ReportSection, Table
from kftrain.reports.wording import clean

MAX_COLUMNS = 12
"""A wider table helps nobody in Markdown and is left out."""

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$]|:(?=//))")
_BLOCK_START = re.compile(r"^(?:(\d+)([.)])(?= |$)|()([-+=:]))")


def render_markdown(section: ReportSection) -> str:
    """Return one section as a short Markdown page."""
    blocks = [f"## {escape(section.title)}: {escape(section.headline)}"]
    blocks += [escape(sentence) for sentence in section.sentences if sentence]
    if section.command:
        blocks.append(f"```\n{_clean_code(section.command)}\n```")
    if section.log:
        blocks.append("\n".join(["```", *map(_clean_code, section.log), "```"]))
    blocks += [_render_figures(section.figures)] if section.figures else []
    tables = [chart.table for chart in section.charts if chart.table is not None] + list(section.tables)
    blocks += [_render_table(table) for table in tables if len(table.columns) <= MAX_COLUMNS]
    blocks += [_render_table(_tabulate_gallery(gallery)) for gallery in section.galleries]
    blocks += ["\n".join(_render_fact(fact) for fact in section.facts)] if section.facts else []
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """Escape foreign text for one line, so that it is shown as it is and no address in it becomes a link."""
    line = " ".join(clean(text).split())
    return _BLOCK_START.sub(lambda start: f"{start[1] or ''}\\{start[2] or start[4]}", _SPECIAL.sub(r"\\\1", line))


def _render_figures(figures: Iterable[Fact]) -> str:
    rows = [[figure.name, f"{figure.value} ({figure.note})" if figure.note else figure.value] for figure in figures]
    return _render_rows(["", ""], rows)


def _tabulate_gallery(gallery: Gallery) -> Table:
    """Turn samples into rows of a table, without their pictures."""
    names = list(dict.fromkeys(fact.name for sample in gallery.samples for fact in sample.facts))[: MAX_COLUMNS - 1]
    values = [{fact.name: fact.value for fact in sample.facts} for sample in gallery.samples]
    rows = [
        [sample.name, *(known.get(name, "") for name in names)]
        for sample, known in zip(gallery.samples, values, strict=True)
    ]
    return Table(gallery.title, ["sample", *names], rows)


def _render_table(table: Table) -> str:
    return f"**{escape(table.title)}**\n\n{_render_rows(table.columns, table.rows)}"


def _render_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in columns[1:])]
    lines = [
        [escape(column) or " " for column in columns],
        rule,
        *([escape(cell) or " " for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _render_fact(fact: Fact) -> str:
    value = f"`{_clean_code(fact.full or fact.value) or ' '}`" if fact.code else escape(fact.value)
    return f"- {escape(fact.name)}: {value}"


def _clean_code(text: str) -> str:
    return " ".join(clean(text).replace("`", "'").split())
