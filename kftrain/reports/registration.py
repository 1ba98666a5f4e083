"""The report of a registration: the gate's decision, its reasons, and champion against challenger."""

from __future__ import annotations

from kftrain.config import Config
from kftrain.reports import wording
from kftrain.reports.charts.interval import Guide, IntervalRow
from kftrain.reports.content import Chart, Fact, ReportSection, Table
from kftrain.reports.evaluation import describe_direction, make_interval_chart
from kftrain.run.documents import Interval, Registration


def describe_registration(config: Config, registration: Registration) -> ReportSection:
    """Return the section of a registration, the decision and its reason on top."""
    charts = [_draw_versions(registration)] if registration.champion is not None else []  # one point is no comparison
    if registration.improvement is not None:
        charts.append(_draw_improvement(config, registration, registration.improvement))
    return ReportSection(
        title="Registration",
        headline=_write_headline(registration),
        tone="good" if registration.promoted else "neutral",
        sentences=[_make_sentence(registration.reason), *_explain_improvement(config, registration)],
        charts=charts,
        tables=_tabulate_reasons(registration),
        facts=_list_facts(registration),
    )


def _write_headline(registration: Registration) -> str:
    name = f"{wording.clean(registration.model_name)} version {registration.version}"
    if registration.identical and not registration.promoted:
        return f"No new version: the model is identical to {name}."
    if registration.promoted:
        return f"{name} is the new champion."
    if registration.champion_version is None or registration.former_champion:
        return f"{name} is registered; there is no champion."
    return f"{name} is registered; version {registration.champion_version} stays champion."


def _explain_improvement(config: Config, registration: Registration) -> list[str]:
    """Explain what the interval of the improvement covers and what it does not."""
    if registration.improvement is None:
        return []
    chance = wording.format_number(100 * (1 - config.registry.confidence) / 2, 2)
    if registration.num_tries and registration.confidence > config.registry.confidence:
        tries = (
            f"It is try {wording.format_count(registration.num_tries)} against this champion. All of them together "
            f"promote a model that is no better with at most {chance}%."
        )
    else:
        tries = f"Of the challengers that are no better about {chance}% are promoted, and more of many tries."
    return [
        f"{tries} The interval holds the noise of the validation sample, not that of the seed: the same settings "
        "trained with another seed may come out differently."
    ]


def _tabulate_reasons(registration: Registration) -> list[Table]:
    """Tabulate the gate's reasons; a single reason already stands in the sentence above."""
    verdicts = {"for": "for it", "against": "against it", "person": "a person decides"}
    rows = [[wording.clean(reason.text), verdicts[reason.verdict], reason.code] for reason in registration.reasons]
    return [Table("What the gate looked at", ["", "speaks", "code"], rows)] if len(rows) > 1 else []


def _make_sentence(text: str) -> str:
    text = wording.capitalize(wording.clean(text).strip())
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


def _draw_versions(registration: Registration) -> Chart:
    challenger, champion = registration.challenger, registration.champion
    role = "new champion" if registration.promoted else "challenger"
    rows = [IntervalRow(f"{role} v{registration.version}", challenger.value, challenger.low, challenger.high)]
    if champion is not None:
        before = "champion before" if registration.promoted else "champion"
        name = before if registration.champion_version is None else f"{before} v{registration.champion_version}"
        rows.append(IntervalRow(name, champion.value, champion.low, champion.high, style="plain"))
    return make_interval_chart(wording.format_label(registration.metric), rows, describe_direction(registration.goal))


def _draw_improvement(config: Config, registration: Registration, improvement: Interval) -> Chart:
    """Draw the paired difference beside zero and the least effect that the gate asks for."""
    rows = [IntervalRow("improvement", improvement.value, improvement.low, improvement.high)]
    least = config.registry.min_effect
    guides = [Guide("", 0.0), Guide(f"needed {least:g}", least)] if least else [Guide("no change", 0.0)]
    title = f"Improvement over version {registration.champion_version}"
    level = (
        wording.format_number(100 * (registration.confidence or config.registry.confidence), 5).rstrip("0").rstrip(".")
    )
    return make_interval_chart(title, rows, f"paired, {level}% interval, right is better", guides, signed=True)


def _list_facts(registration: Registration) -> list[Fact]:
    return [
        Fact("Run", registration.run_id, code=True),
        Fact("Model", registration.model_name, code=True),
        Fact("Version", str(registration.version)),
        Fact("Logged model", registration.logged_model_id, code=True),
        Fact("MLflow run", registration.mlflow_run_id, code=True),
        Fact("Tracking", registration.tracking_uri, code=True),
    ]
