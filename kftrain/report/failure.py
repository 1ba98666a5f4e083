"""The report of a failure: what failed, why, where, and the one command to run next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kftrain.errors import BUG_CODE
from kftrain.report import wording
from kftrain.report.content import Fact, Section
from kftrain.run import advice
from kftrain.run.advice import Advice, Situation


def section(error: Mapping[str, Any], stage: str, situation: Situation) -> Section:
    """The section of a failed stage, from its `error.json` (see `stages.failure`); fields may be missing."""
    what = _text(error, "what") or _text(error, "line") or "it left no message"
    found = error.get("failure") or {}
    next_ = next_step(error, situation)
    return Section(
        title="Failure",
        headline=f"{wording.label(stage) or 'The run'} failed: {_ended(what)}",
        tone="bad",
        sentences=[sentence for sentence in (next_.text, *(error.get("warnings") or ())) if sentence],
        command=next_.command,
        log=[wording.clean(line) for line in found.get("last_lines") or ()],
        facts=[fact for fact in (*_facts(error, stage, situation), *_places(found)) if fact.value],
    )


def next_step(error: Mapping[str, Any], situation: Situation) -> Advice:
    """What to do about it, and the command for that; foreign text in it is safe to show."""
    found = advice.advise(error, situation)
    return Advice(wording.clean(found.text).strip(), wording.clean(found.command))


def _facts(error: Mapping[str, Any], stage: str, situation: Situation) -> list[Fact]:
    value = error.get("value")
    return [
        Fact("Stage", stage),
        Fact("Where", _text(error, "where"), code=True),
        Fact("Value", "" if value is None else str(value), code=True),
        Fact("Kind", _text(error, "kind")),
        Fact("Exit code", str(_exit_code(error)), _meaning(error)),
        Fact("Run", situation.run_uri, code=True),
        Fact("Log", situation.log, code=True),
    ]


def _places(found: Mapping[str, Any]) -> list[Fact]:
    """What the launcher found out about a job: see `documents.FailureSummary`."""
    rank = found.get("rank")
    return [
        Fact("Class", _text(found, "failure_class")),
        Fact("First failing rank", "" if rank is None else str(rank)),
        Fact("Node", _text(found, "node"), code=True),
        Fact("Pod", _text(found, "pod"), code=True),
    ]


def _meaning(error: Mapping[str, Any]) -> str:
    passing = advice.class_of(error) in advice.PASSING
    return "may succeed when run again" if passing else "fails again unless something is changed"


def _exit_code(error: Mapping[str, Any]) -> int:
    code = error.get("exit_code")
    return code if isinstance(code, int) else BUG_CODE


def _text(error: Mapping[str, Any], key: str) -> str:
    value = error.get(key)
    return wording.clean(value).strip() if isinstance(value, str) else ""


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
