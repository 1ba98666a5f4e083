"""The report of every step of a scheduled run that had nothing to do."""

from __future__ import annotations

from kftrain.report.content import ReportSection, uri


def section(run_uri: str, line: str) -> ReportSection:
    """The section of a run that ended at once: why."""
    return ReportSection(
        title="Nothing to do",
        headline="There is nothing to do for this run.",
        tone="good",
        sentences=[f"{line[:1].upper()}{line[1:]}.", "Nothing was trained, and nothing registered."],
        facts=[uri("Run", run_uri)],
    )
