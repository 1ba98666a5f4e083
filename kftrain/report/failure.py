"""The report of a failure: what failed, why, where, and the one command to run next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from kftrain.errors import BUG_CODE, FIRST_RETRYABLE_CODE, CheckpointError, ConfigError, DivergedError, FencedError
from kftrain.report import wording
from kftrain.report.content import Fact, Section

CONFIG_ADVICE = (
    "Then go on with the run. Another task, model, precision or optimizer is another training: it needs a new run."
)


def section(error: Mapping[str, Any], stage: str, run_uri: str) -> Section:
    """The section of a failed stage, from its `error.json` (see `stages.failure`); fields may be missing."""
    what = _text(error, "what") or _text(error, "line") or "it left no message"
    advice, command = next_step(error, run_uri)
    found = error.get("failure") or {}
    return Section(
        title="Failure",
        headline=f"{wording.label(stage) or 'The run'} failed: {_ended(what)}",
        tone="bad",
        sentences=[
            sentence for sentence in (_text(found, "advice"), advice, *(error.get("warnings") or ())) if sentence
        ],
        command=command,
        log=[wording.clean(line) for line in found.get("last_lines") or ()],
        facts=[fact for fact in (*_facts(error, stage, run_uri), *_places(found)) if fact.value],
    )


def next_step(error: Mapping[str, Any], run_uri: str) -> tuple[str, str]:
    """What to do about it, and the command for that."""
    code, fix = _exit_code(error), _text(error, "fix")
    uri = wording.clean(run_uri).rstrip("/")
    first = f"{fix[:1].upper()}{_ended(fix[1:])} " if fix else ""
    if code == FencedError.exit_code:
        return f"{first}Another attempt of this run is at work; nothing is lost and nothing needs to be done here.", ""
    if code == DivergedError.exit_code:
        command = "kftrain run --set optimizer.learning_rate=RATE"
        return f"{first}Start a new run with a lower learning rate; this one would diverge again.", command
    if code == CheckpointError.exit_code:
        return f"{first}See which checkpoints are committed.", f"kftrain checkpoints list {shlex.quote(uri)}"
    if not uri:
        return f"{first}Then start a new run.", "kftrain run"
    if code == ConfigError.exit_code:
        command = f"kftrain run --resume {shlex.quote(uri)} --set KEY=VALUE"
        return f"{first}{CONFIG_ADVICE}", command
    return first + _resuming(code, uri), f"kftrain run --resume {shlex.quote(uri)}"


def _resuming(code: int, uri: str) -> str:
    """Why to resume, here or in the Kubeflow UI."""
    there = f"In the Kubeflow UI, start a run with nothing but resume_run set to {uri}."
    if code >= FIRST_RETRYABLE_CODE:
        return f"The cause may be gone by now: the run goes on from its last committed checkpoint. {there}"
    if code == BUG_CODE:
        return f"This is not an expected failure; the traceback is in the log. What is complete is kept. {there}"
    return f"Then go on: what is complete is kept. {there}"


def _facts(error: Mapping[str, Any], stage: str, run_uri: str) -> list[Fact]:
    value = error.get("value")
    return [
        Fact("Stage", stage),
        Fact("Where", _text(error, "where"), code=True),
        Fact("Value", "" if value is None else str(value), code=True),
        Fact("Kind", _text(error, "kind")),
        Fact("Exit code", str(_exit_code(error)), _meaning(_exit_code(error))),
        Fact("Run", run_uri, code=True),
    ]


def _places(found: Mapping[str, Any]) -> list[Fact]:
    """What the launcher found out about a job: see `contracts.FailureSummary`."""
    rank = found.get("rank")
    return [
        Fact("Class", _text(found, "failure_class")),
        Fact("First failing rank", "" if rank is None else str(rank)),
        Fact("Node", _text(found, "node"), code=True),
        Fact("Pod", _text(found, "pod"), code=True),
    ]


def _meaning(code: int) -> str:
    return "may succeed when run again" if code >= FIRST_RETRYABLE_CODE else "fails again unless something is changed"


def _exit_code(error: Mapping[str, Any]) -> int:
    code = error.get("exit_code")
    return code if isinstance(code, int) else BUG_CODE


def _text(error: Mapping[str, Any], key: str) -> str:
    value = error.get(key)
    return wording.clean(value).strip() if isinstance(value, str) else ""


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
