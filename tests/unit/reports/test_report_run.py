"""The page of a run answers what its reader asks: compared with what, in which unit, made where, used how."""

from __future__ import annotations

import html
import itertools
import re
from typing import Any
from xml.etree import ElementTree

import pytest
from report_documents import Documents

from kftrain import config, reports
from kftrain.reports.charts.line import ReferenceLine, Series, draw_line_chart
from kftrain.run.documents import Completion, Evaluation, Registration, Slice

WIDTH_PX, HEIGHT_PX = 330, 120


def shown(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.split("</style>")[1])).split())


@pytest.fixture
def page(documents: Documents) -> str:
    return documents.run_page(reports.describe_environment())


@pytest.mark.parametrize(
    "part",
    [
        "0.0388 epochs",  # 12,800 samples of 248,731 + 81,004
        "nats per token",
        "Samples spread over the data json/decoder.py text def decode(self, s): obj the model writes ect = self",
        "Samples with the largest loss asyncio/base.py bits per byte 4.500",
        "the first 256 samples of the validation split (evaluate.max_interval_samples), the evaluation is of all 5,321",
        "model.kind",
        "optimizer.learning_rate 0.001",
        "mlflow.set_tracking_uri('sqlite:////data/mlflow.db')",
        "mlflow.pyfunc.load_model('models:/stdlib-lm/7')",
        "Host",
        "Python 3.",
        "new champion v7",
        "champion before v5",
    ],
)
def test_the_page_of_a_run_says(page: str, part: str) -> None:
    # A shell needs the quotes of a command to be quoted themselves.
    assert part in shown(page).replace("'\"'\"'", "'")


def test_a_first_model_is_compared_with_nothing_in_no_chart(
    settings: config.Config, registration: Registration
) -> None:
    alone = {"champion": None, "champion_version": None, "improvement": None}
    text = reports.render_section(
        reports.describe_registration(settings, registration.model_copy(update=alone)), settings.run.name
    )
    assert "challenger" not in text and "<svg" not in text
    assert "challenger v7" in reports.render_section(
        reports.describe_registration(settings, registration.model_copy(update={"promoted": False})), settings.run.name
    )


def test_a_slice_of_hardly_any_samples_never_heads_the_list(settings: config.Config, evaluation: Evaluation) -> None:
    slices = {**evaluation.slices, "tiny": Slice(num_samples=2, metrics={"bits_per_byte": 9.0})}
    text = reports.render_section(
        reports.describe_evaluation(settings, evaluation.model_copy(update={"slices": slices})), settings.run.name
    )
    assert re.findall(r'class="row">(asyncio|json|ctypes|tiny)<', text) == ["asyncio", "json", "ctypes", "tiny"]
    assert "those of fewer than 10 samples last" in text
    assert "samples last" not in reports.render_section(
        reports.describe_evaluation(settings, evaluation), settings.run.name
    )


def test_a_baselines_name_is_not_cut_where_there_is_room(settings: config.Config, completion: Completion) -> None:
    history = [{"step": step, "validation/accuracy": 0.1 * step} for step in range(1, 7)]
    evaluated = reports.render_page(
        reports.compose_run_page(
            settings,
            completion=completion,
            history=history,
            evaluation=with_accuracy(completion, "most frequent class"),
        )
    )
    assert ">most frequent class 0.134<" in evaluated


def with_accuracy(completion: Completion, baseline: str) -> Evaluation:
    return Evaluation(
        evaluation_digest="e",
        checkpoint_digest=completion.checkpoint_digest,
        export_uri=completion.export_uri,
        export_digest=completion.export_digest,
        dataset_digest=completion.dataset_digest,
        num_samples=100,
        num_groups=100,
        confidence=0.95,
        metrics={"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}},  # type: ignore[dict-item]
        baselines={"accuracy": {baseline: 0.134}},
        statistics_sha256="f" * 64,
    )


CURVES = {
    "starts above the level on the left": [(0, 1.05), (50, 1.5), (100, 2.0)],
    "falls through it": [(0, 1.1), (40, 1.0), (100, 0.2)],
    "rises through it": [(0, 0.2), (60, 1.0), (100, 1.1)],
    "lies on it at the left, rises far": [(0, 1.0), (30, 1.0), (100, 3.0)],
}


@pytest.mark.parametrize("name", CURVES)
def test_the_name_of_a_level_lies_over_no_curve(name: str) -> None:
    """Sampled at every pixel of the narrowest chart: the curve as it is drawn, the label where it stands."""
    drawing = draw_line_chart([Series("", CURVES[name])], [ReferenceLine("class frequencies 1", 1.0)], description="d")
    root = ElementTree.fromstring(drawing)
    (label,) = [node for node in root.iter("text") if "halo" in node.attrib["class"]]
    middle, width = float(label.attrib["y"]) - 4, 6 * len(label.text or "")
    start = WIDTH_PX - width if label.attrib.get("text-anchor") == "end" else 0
    (path,) = [node.attrib["d"] for node in root.iter("path")]
    points = [tuple(map(float, pair.split())) for pair in path[1:].split("L")]
    for x in range(start, start + width):
        at = x / WIDTH_PX * 1000
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if x0 <= at <= x1:
                assert abs(y0 + (y1 - y0) * (at - x0) / (x1 - x0) - middle) > 7, (x, label.attrib)


def rows_of(page: str) -> dict[str, str]:
    """Name of each slice -> the colour of its dot and, if it has one, of its interval."""
    found = {}
    for name, rest in re.findall(r'class="row">([^<]+)</text>(.*?)(?=class="row"|</svg>)', page, flags=re.DOTALL):
        bar, dot = re.search(r'class="(interval|stem) (\w+)"', rest), re.search(r'class="dot (\w+)"', rest)
        found[name] = f"{bar[1] if bar else ''} {dot[1] if dot else ''}"
    return found


def test_a_slice_has_its_interval_and_a_colour_only_where_the_whole_is_outside(
    settings: config.Config, evaluation: Evaluation
) -> None:
    # The whole is 2.337; lower is better.
    bounds = {"worse": (2.5, 2.4, 2.6), "chance": (2.9, 2.2, 3.4), "better": (2.0, 1.9, 2.1), "open": (2.8, None, None)}
    slices = {
        name: Slice(
            num_samples=50,
            metrics={"bits_per_byte": value},
            intervals={"bits_per_byte": {"value": value, "low": low, "high": high}},  # type: ignore[dict-item]
        )
        for name, (value, low, high) in bounds.items()
    }
    changed = evaluation.model_copy(update={"slices": slices})
    drawn = rows_of(reports.render_section(reports.describe_evaluation(settings, changed), settings.run.name))
    assert {name: drawn[name] for name in bounds} == {
        "worse": "interval worse",
        "chance": "interval plain",
        "better": "interval better",
        "open": "interval plain",
    }
    text = reports.render_markdown(reports.describe_evaluation(settings, changed))
    assert "| worse | 2.50 | 2.40 to 2.60 | 50 |" in text and "| open | 2.800 |   | 50 |" in text
    before = rows_of(reports.render_section(reports.describe_evaluation(settings, evaluation), settings.run.name))
    assert (before["asyncio"], before["ctypes"]) == ("stem worse", "stem better")


def test_a_unit_is_shown_for_an_own_tasks_loss_and_none_where_none_is_known(
    settings: config.Config, completion: Completion, history: list[dict[str, Any]]
) -> None:
    own = settings.model_copy(update={"task": config.TaskConfig(kind="my.task:Regression")})
    known = completion.model_copy(update={"loss_unit": "squared <b>km</b>"})
    assert (
        shown(
            reports.render_section(reports.describe_training(own, known, history), own.run.name, own.to_yaml())
        ).count("squared <b>km</b>")
        == 2
    )
    unknown = completion.model_copy(update={"loss_unit": ""})
    assert "nats" not in shown(
        reports.render_section(reports.describe_training(own, unknown, history), own.run.name, own.to_yaml())
    )


def test_pages_of_an_evaluation_without_samples_say_nothing_of_them(
    settings: config.Config, evaluation: Evaluation
) -> None:
    without = evaluation.model_copy(update={"examples": []})
    assert "Samples" not in shown(
        reports.render_section(reports.describe_evaluation(settings, without), settings.run.name)
    )
