"""The page of a comparison: what it says, that it stands alone, and that it shows text as text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from report_documents import make_history

from kftrain import reports
from kftrain.reports.comparison import write_headline
from kftrain.reports.versions import ReportedVersion, VersionComparison, find_differences, to_plain
from kftrain.run.attempts import Claim
from kftrain.run.documents import Completion, Evaluation, Interval, Slice
from kftrain.run.timeline import compute_timeline

HOSTILE = "</title></style><script>alert('x')</script><img src=x onerror=\"y\"> & ]]> {{ 7 * 7 }} http://evil/x"

BASE = "version 3 (champion)"


def interval(value: float, half_width: float = 0.02) -> Interval:
    return Interval(value=value, low=value - half_width, high=value + half_width)


def claims() -> list[Claim]:
    common = {"world_size": 4, "host": "h", "process_id": 1}
    return [
        Claim(attempt=1, start_step=0, start_time=0.0, **common),
        Claim(attempt=2, start_step=100, start_time=90.0, **common),
    ]


@pytest.fixture
def versions(completion: Completion, evaluation: Evaluation, history: list[dict]) -> list[ReportedVersion]:
    slices = {name: {"bits_per_byte": interval(gain)} for name, gain in (("json", -0.2), ("asyncio", 0.01))}
    slices["ctypes"] = {"bits_per_byte": Interval(value=-0.1, low=float("-inf"), high=float("inf"))}
    base = ReportedVersion(
        3,
        ("champion",),
        "r-3",
        "/data/runs/r-3",
        evaluation=evaluation,
        completion=completion,
        history=history,
        timeline=compute_timeline(claims(), completion, history),
        settings={"run.seed": "0", "train.steps": "400", "model.dim": "128"},
        data={"source": "stdlib", "dataset_digest": "a" * 64},
        tokens_per_sample=256,
    )
    better = {"bits_per_byte": interval(-0.1), "perplexity": interval(-1.5)}
    other = replace(
        base,
        version=7,
        aliases=(),
        run_uri="/data/runs/r-7",
        differences=better,
        slice_differences=slices,
        settings=base.settings | {"run.seed": "1"},
        has_gpus=True,
    )
    return [other, base]


@pytest.fixture
def found(versions: list[ReportedVersion]) -> VersionComparison:
    return VersionComparison("stdlib-lm", "bits_per_byte", "minimize", 0.95, 3, "e" * 64, versions)


def texts(html: str) -> str:
    return " ".join("".join(ElementTree.fromstring(html.split("<!DOCTYPE html>")[1]).itertext()).split())


def with_difference(found: VersionComparison, *gains: Interval | None) -> VersionComparison:
    """Versions 7, 8 … with these differences in bits per byte to version 3; None: it cannot be compared."""
    others = [
        replace(found.versions[0], version=7 + n, differences={} if gain is None else {"bits_per_byte": gain})
        for n, gain in enumerate(gains)
    ]
    return replace(found, versions=[*others, found.base])


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        (
            (interval(-0.1),),
            "Version 7 is better than version 3 (champion) in bits per byte, by 0.100 (0.080 to 0.120).",
        ),
        ((interval(0.1),), "Version 7 is worse than version 3 (champion) in bits per byte, by 0.100 (0.080 to 0.120)."),
        ((interval(0.01),), "Version 7 is not distinguishable from version 3 (champion) in bits per byte."),
        ((interval(0.1), interval(-0.3)), "Version 8 is better than version 3 (champion) in bits per byte, by 0.300"),
        ((interval(0.1), interval(0.01)), "No version is distinguishably better than version 3 (champion)"),
        ((interval(0.1), interval(0.2)), "Version 7 and all others are worse than version 3 (champion)"),
        ((None,), "No version can be compared with version 3 (champion)."),
        ((), "There is only version 3 (champion): nothing to compare it with."),
    ],
)
def test_the_headline_says_which_is_better(found: VersionComparison, gains: tuple, said: str) -> None:
    assert write_headline(with_difference(found, *gains)).startswith(said)


def test_more_is_better_where_the_metric_is_to_be_maximized(found: VersionComparison) -> None:
    assert "is worse than" in write_headline(replace(with_difference(found, interval(-0.1)), goal="maximize"))


def test_the_page_shows_metrics_slices_curves_cost_and_only_what_differs(found: VersionComparison) -> None:
    shown = texts(reports.render_page(reports.compose_comparison_page(found)))
    assert "Of 3 slices, v7 is better in 1 and worse in 0 than version 3 (champion)." in shown
    for part in ("Loss over samples", "Loss over tokens", "Loss over minutes", "Bits per byte over tokens"):
        assert part in shown
    assert "run.seed" in shown and "train.steps" not in shown and "model.dim" not in shown
    assert "It is the same." in shown  # the data
    assert "1.86M" in shown and "3.28M" in shown  # parameters; 12,800 samples of 256 tokens
    wall = 90 + 200.4
    assert f"{4 * wall / 3600:.4f}"[:6] in shown and "GPU hours" in shown and "process hours" in shown
    assert "infinite" not in shown


def test_markdown_has_the_same_tables(found: VersionComparison) -> None:
    text = reports.render_markdown(reports.describe_comparison(found))
    assert text.startswith("## Comparison: Version 7 is better than version 3")
    for part in ("| run.seed | 1 | 0 |", "| json |", "goodput", "**Difference to version 3 \\(champion\\)**"):
        assert part.replace("\\(", "(").replace("\\)", ")") in text.replace("\\(", "(").replace("\\)", ")")


def test_a_page_stands_alone_and_shows_hostile_text_as_text(found: VersionComparison) -> None:
    evaluation = found.base.evaluation
    assert evaluation is not None
    attacked = evaluation.model_copy(
        update={
            "metrics": {HOSTILE: interval(0.5)},
            "slices": {HOSTILE: Slice(num_samples=3, metrics={HOSTILE: 0.5})},
        }
    )
    hostile = [
        replace(
            each,
            aliases=(HOSTILE,),
            run_uri=HOSTILE,
            problem=HOSTILE,
            evaluation=attacked,
            settings={HOSTILE: f"{HOSTILE}{each.version}"},
            data={HOSTILE: f"{each.version}{HOSTILE}"},
            differences={HOSTILE: interval(0.3)} if each.version == 7 else {},
            slice_differences={HOSTILE: {HOSTILE: interval(0.3)}} if each.version == 7 else {},
        )
        for each in found.versions
    ]
    html = reports.render_page(
        reports.compose_comparison_page(replace(found, model_name=HOSTILE, metric=HOSTILE, versions=hostile))
    )
    assert "<script>alert('x')</script>" in texts(html)
    root = ElementTree.fromstring(html.split("<!DOCTYPE html>")[1])
    assert not {element.tag for element in root.iter()} & {"script", "img", "a", "link", "iframe", "object"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not [name for name in names if name.startswith("on") or name in ("href", "src")]
    assert not re.search(r"url\(|@import|https?:", "".join(style.text or "" for style in root.iter("style")))
    reports.render_markdown(
        reports.describe_comparison(replace(found, model_name=HOSTILE, metric=HOSTILE, versions=hostile))
    )


def test_eight_long_trainings_make_a_page_below_two_megabytes(found: VersionComparison) -> None:
    history = make_history(4096)
    many = [replace(found.versions[0], version=n, history=history) for n in range(4, 12)]
    html = reports.render_page(reports.compose_comparison_page(replace(found, versions=[found.base, *many])))
    assert len(html.encode()) < 2_000_000
    assert "running mean" in html


def test_versions_of_which_nothing_is_left_make_a_page(found: VersionComparison) -> None:
    gone = [ReportedVersion(3, problem="no evaluation that can be read"), ReportedVersion(7)]
    shown = texts(reports.render_page(reports.compose_comparison_page(replace(found, versions=gone))))
    assert "Version 3: no evaluation that can be read." in shown


def test_differing_keeps_only_what_is_not_equal_everywhere() -> None:
    assert find_differences([{"a": "1", "b": "2"}, {"a": "1", "c": "3"}]) == {"b": ["2", ""], "c": ["", "3"]}
    assert find_differences([{"a": "1"}]) == find_differences([]) == {}


def test_as_json_it_is_plain_data(found: VersionComparison) -> None:
    plain = json.loads(json.dumps(to_plain(found), allow_nan=False))
    seven, three = plain["versions"]
    assert seven["improvement"] == pytest.approx({"value": 0.1, "low": 0.08, "high": 0.12})
    assert three["improvement"] is None and plain["config_differences"] == {"run.seed": {"7": "1", "3": "0"}}
    assert set(seven["cost"]) >= {"gpu_hours", "goodput", "attempts"} and "process_hours" in three["cost"]
