"""Reports of how a run ended: it failed, it succeeded, or there was nothing to do."""

from __future__ import annotations

from collections.abc import Sequence

from kftrain.reports import wording
from kftrain.reports.content import Fact, ReportSection, make_uri_fact
from kftrain.run import advice
from kftrain.run.advice import Situation
from kftrain.run.error import ErrorDocument


def describe_failure(error: ErrorDocument, stage: str, situation: Situation) -> ReportSection:
    """Return the section of a failed stage, from its `error.json` (see `run.error`)."""
    what = _clean_text(error.what) or _clean_text(error.line)
    next_step = advice.advise(error, situation)  # whose text may be foreign
    return ReportSection(
        title="Failure",
        headline=f"{wording.format_label(stage) or 'The run'} failed: {_end_sentence(what)}",
        tone="bad",
        sentences=[sentence for sentence in (wording.clean(next_step.text).strip(), *error.warnings) if sentence],
        command=wording.clean(next_step.command),
        log=[wording.clean(line) for line in error.last_lines],
        facts=[fact for fact in (*_list_facts(error, stage, situation), *_list_places(error)) if fact.value],
    )


def describe_success(run_uri: str, report_uri: str, removed: Sequence[str], warnings: Sequence[str]) -> ReportSection:
    """Return the section of a run that succeeded: what was removed, what could not be, and where its report lies."""
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
        facts=[make_uri_fact("Report of the run", report_uri), make_uri_fact("Run", run_uri)],
    )


def describe_idle_run(run_uri: str, line: str) -> ReportSection:
    """Return the section of a scheduled run that had nothing to do; `line` says why."""
    return ReportSection(
        title="Nothing to do",
        headline="There is nothing to do for this run.",
        tone="good",
        sentences=[f"{wording.capitalize(line)}.", "Nothing was trained, and nothing registered."],
        facts=[make_uri_fact("Run", run_uri)],
    )


def _list_facts(error: ErrorDocument, stage: str, situation: Situation) -> list[Fact]:
    return [
        Fact("Stage", stage),
        Fact("Where", _clean_text(error.where), code=True),
        Fact("Value", error.value or "", code=True),
        Fact("Kind", _clean_text(error.kind)),
        Fact("Exit code", str(error.exit_code), _explain_exit_code(error)),
        Fact("Run", situation.run_uri, code=True),
        Fact("Log", situation.log, code=True),
    ]


def _list_places(error: ErrorDocument) -> list[Fact]:
    """Return the class of the failure and the part of the job that failed first."""
    return [
        Fact("Class", error.failure_class.value),
        Fact("First failing rank", "" if error.rank is None else str(error.rank)),
        Fact("Node", _clean_text(error.node), code=True),
        Fact("Pod", _clean_text(error.pod), code=True),
    ]


def _explain_exit_code(error: ErrorDocument) -> str:
    passing = error.failure_class in advice.PASSING
    return "may succeed when run again" if passing else "fails again unless something is changed"


def _clean_text(text: str) -> str:
    return wording.clean(text).strip()


def _end_sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
