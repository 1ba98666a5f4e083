"""The report of a failure: what failed, why, where, and the one command to run next."""

from __future__ import annotations

from kftrain.report import wording
from kftrain.report.content import Fact, ReportSection
from kftrain.run import advice
from kftrain.run.advice import Advice, Situation
from kftrain.run.error import ErrorDocument


def section(error: ErrorDocument, stage: str, situation: Situation) -> ReportSection:
    """The section of a failed stage, from its `error.json` (see `run.error`)."""
    what = _clean(error.what) or _clean(error.line)
    next_ = next_step(error, situation)
    return ReportSection(
        title="Failure",
        headline=f"{wording.label(stage) or 'The run'} failed: {_ended(what)}",
        tone="bad",
        sentences=[sentence for sentence in (next_.text, *error.warnings) if sentence],
        command=next_.command,
        log=[wording.clean(line) for line in error.last_lines],
        facts=[fact for fact in (*_facts(error, stage, situation), *_places(error)) if fact.value],
    )


def next_step(error: ErrorDocument, situation: Situation) -> Advice:
    """What to do about it, and the command for that; foreign text in it is safe to show."""
    found = advice.advise(error, situation)
    return Advice(wording.clean(found.text).strip(), wording.clean(found.command))


def _facts(error: ErrorDocument, stage: str, situation: Situation) -> list[Fact]:
    return [
        Fact("Stage", stage),
        Fact("Where", _clean(error.where), code=True),
        Fact("Value", error.value or "", code=True),
        Fact("Kind", _clean(error.kind)),
        Fact("Exit code", str(error.exit_code), _meaning(error)),
        Fact("Run", situation.run_uri, code=True),
        Fact("Log", situation.log, code=True),
    ]


def _places(error: ErrorDocument) -> list[Fact]:
    """Which kind of failure it was, and which part of a job failed."""
    return [
        Fact("Class", error.failure_class.value),
        Fact("First failing rank", "" if error.rank is None else str(error.rank)),
        Fact("Node", _clean(error.node), code=True),
        Fact("Pod", _clean(error.pod), code=True),
    ]


def _meaning(error: ErrorDocument) -> str:
    passing = error.failure_class in advice.PASSING
    return "may succeed when run again" if passing else "fails again unless something is changed"


def _clean(text: str) -> str:
    return wording.clean(text).strip()


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
