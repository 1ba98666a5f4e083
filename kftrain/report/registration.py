"""The report of a registration: champion against challenger, and what the gate decided."""

from __future__ import annotations

from kftrain.config import Config
from kftrain.report import wording
from kftrain.report.charts.interval import Guide, IntervalRow, interval_chart
from kftrain.report.content import Chart, Fact, ReportSection, Table
from kftrain.report.evaluation import direction
from kftrain.run.documents import Interval, Registration


def section(config: Config, registration: Registration) -> ReportSection:
    """The section of a registration: the decision and its reason on top."""
    charts = [_versions_chart(registration)] if registration.champion is not None else []  # one point is no comparison
    if registration.improvement is not None:
        charts.append(_improvement_chart(config, registration, registration.improvement))
    return ReportSection(
        title="Registration",
        headline=_headline(registration),
        tone="good" if registration.promoted else "neutral",
        sentences=[_sentence(registration.reason), *_meaning(config, registration)],
        charts=charts,
        tables=_looked_at(registration),
        facts=_facts(registration),
    )


def _headline(registration: Registration) -> str:
    name = f"{wording.clean(registration.model_name)} version {registration.version}"
    if registration.identical and not registration.promoted:
        return f"No new version: the model is identical to {name}."
    if registration.promoted:
        return f"{name} is the new champion."
    if registration.champion_version is None or registration.former_champion:
        return f"{name} is registered; there is no champion."
    return f"{name} is registered; version {registration.champion_version} stays champion."


def _meaning(config: Config, registration: Registration) -> list[str]:
    """What the interval of the improvement says, and what it does not."""
    if registration.improvement is None:
        return []
    chance = wording.number(100 * (1 - config.registry.confidence) / 2, 2)
    if registration.num_tries and registration.confidence > config.registry.confidence:
        tries = (
            f"It is try {wording.count(registration.num_tries)} against this champion. All of them together promote a "
            f"model that is no better with at most {chance}%."
        )
    else:
        tries = f"Of the challengers that are no better about {chance}% are promoted, and more of many tries."
    return [
        f"{tries} The interval holds the noise of the validation sample, not that of the seed: the same settings "
        "trained with another seed may come out differently."
    ]


def _looked_at(registration: Registration) -> list[Table]:
    """All that the gate looked at, where there is more than the one thing that the sentence says."""
    said = {"for": "for it", "against": "against it", "person": "a person decides"}
    rows = [[wording.clean(each.text), said[each.verdict], each.code] for each in registration.reasons]
    return [Table("What the gate looked at", ["", "speaks", "code"], rows)] if len(rows) > 1 else []


def _sentence(text: str) -> str:
    text = wording.clean(text).strip()
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "!", "?")) or not text else ".")


def _versions_chart(registration: Registration) -> Chart:
    challenger, champion = registration.challenger, registration.champion
    role = "new champion" if registration.promoted else "challenger"
    rows = [IntervalRow(f"{role} v{registration.version}", challenger.value, challenger.low, challenger.high)]
    if champion is not None:
        before = "champion before" if registration.promoted else "champion"
        name = before if registration.champion_version is None else f"{before} v{registration.champion_version}"
        rows.append(IntervalRow(name, champion.value, champion.low, champion.high, style="plain"))
    title = wording.label(registration.metric)
    return Chart(
        title,
        interval_chart(rows, description=_description(title, rows)),
        direction(registration.goal),
        _table(title, rows),
    )


def _improvement_chart(config: Config, registration: Registration, improvement: Interval) -> Chart:
    """The paired difference against zero, and against the least effect that the gate asks for."""
    rows = [IntervalRow("improvement", improvement.value, improvement.low, improvement.high)]
    least = config.registry.min_effect
    guides = [Guide("", 0.0), Guide(f"needed {least:g}", least)] if least else [Guide("no change", 0.0)]
    title = f"Improvement over version {registration.champion_version}"
    level = wording.number(100 * (registration.confidence or config.registry.confidence), 5).rstrip("0").rstrip(".")
    note = f"paired, {level}% interval, right is better"
    drawing = interval_chart(rows, guides, description=_description(title, rows), signed=True)
    return Chart(title, drawing, note, _table(title, rows))


def _description(title: str, rows: list[IntervalRow]) -> str:
    return f"{title}: " + ", ".join(f"{row.name} {' '.join(row.shown)}".strip() for row in rows)


def _table(title: str, rows: list[IntervalRow]) -> Table:
    return Table(title, ["", "value", "interval"], [[row.name, *row.shown] for row in rows])


def _facts(registration: Registration) -> list[Fact]:
    return [
        Fact("Run", registration.run_id, code=True),
        Fact("Model", registration.model_name, code=True),
        Fact("Version", str(registration.version)),
        Fact("Logged model", registration.logged_model_id, code=True),
        Fact("MLflow run", registration.mlflow_run_id, code=True),
        Fact("Tracking", registration.tracking_uri, code=True),
    ]
