"""The report of the exit handler after a run that succeeded: what it removed, and where the run's page is."""

from __future__ import annotations

from collections.abc import Sequence

from kftrain.report.content import ReportSection, uri


def section(run_uri: str, report_uri: str, removed: Sequence[str], warnings: Sequence[str]) -> ReportSection:
    """The section of a clean end: what was removed, what could not be, and where the report of the run lies."""
    done = "; ".join(removed)
    return ReportSection(
        title="Finish",
        headline="The run succeeded.",
        tone="good",
        sentences=[
            f"Removed, because it was never finished: {done}." if done else "There was nothing to clean up.",
            *warnings,
            "What was trained, how good it is and what became of it is in the report of the step register"
            " (Visualization, or the file below).",
        ],
        facts=[uri("Report of the run", report_uri), uri("Run", run_uri)],
    )
