from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from report_documents import DIGESTS, Documents, make_history

from kftrain import config, reports
from kftrain.errors import ConfigError, DataError, DivergedError, FencedError, HangError
from kftrain.run.advice import Place, Situation
from kftrain.run.documents import Completion, Confusion, Evaluation, Interval, Registration, Slice
from kftrain.run.error import ErrorDocument

AT_HOME = Situation(Place.LAPTOP, "/data/runs/stdlib-lm-1", log="/data/logs/1.log")
HOSTILE = "</title></style><script>alert('x')</script><img src=x onerror=\"y\"> & ]]> {{ 7 * 7 }} http://evil/x"
TAGS = set(
    re.findall(
        r"\w+",
        "html head meta title style body main header footer section p h1 h2 h3 small strong span dl dt dd div figure"
        " figcaption img svg path line circle rect text table caption thead tbody tr th td pre code details summary",
    )
)
ATTRIBUTES = set(
    re.findall(
        r"[\w-]+",
        "lang charset http-equiv content name class scope title src alt style role aria-label width height viewbox x y"
        " x1 y1 x2 preserveaspectratio y2 cx cy r dx d text-anchor transform fill-opacity vector-effect",
    )
)
Pages = dict[str, str]


class Reader(HTMLParser):
    """Elements, attributes and text as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.inside = tag
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self.inside != "style":
            self.text.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    @property
    def shown(self) -> str:
        return " ".join(" ".join(self.text).split())


def all_pages(of: Documents, error: ErrorDocument) -> Pages:
    return {
        "training": reports.render_section(
            reports.describe_training(of.settings, of.completion, of.history),
            of.settings.run.name,
            of.settings.to_yaml(),
        ),
        "evaluation": reports.render_section(
            reports.describe_evaluation(of.settings, of.evaluation), of.settings.run.name
        ),
        "registration": reports.render_section(
            reports.describe_registration(of.settings, of.registration), of.settings.run.name
        ),
        "failure": reports.render_section(reports.describe_failure(error, "train", AT_HOME), "train"),
        "run": of.run_page(),
    }


@pytest.fixture
def error() -> ErrorDocument:
    return ErrorDocument.of(
        DataError(
            "shard does not match its digest", where="/data/train-000003.tar", value="9f2c", fix="shard the data again"
        )
    )


@pytest.fixture
def pages(documents: Documents, error: ErrorDocument) -> Pages:
    return all_pages(documents, error)


def with_hostile_text(value: Any) -> Any:
    """The JSON value with every string in it, and every key that is data, replaced by text that tries to break out."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, list):
        return [with_hostile_text(item) for item in value]
    if isinstance(value, dict):
        return {key: with_hostile_text(item) for key, item in value.items()}
    return value


def check_harmless(html: str) -> Reader:
    ElementTree.fromstring(html.split("<!DOCTYPE html>")[1])
    reader = Reader(html)
    assert reader.tags <= TAGS
    assert {name for name, _ in reader.attributes} <= ATTRIBUTES
    for name, value in reader.attributes:
        assert name != "src" or re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}", value)
        assert name != "style" or re.fullmatch(r"padding:[\d px]+(;max-width:\d+px)?", value)
    (style,) = re.findall(r"<style>(.*?)</style>", html, flags=re.DOTALL)
    assert not re.search(r"url\(|@import|https?:|expression", style)
    return reader


def test_pages_are_well_formed_and_load_nothing(pages: Pages) -> None:
    for html in pages.values():
        check_harmless(html)
        (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)
        assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
        assert not re.search(r"https?://|\bsrc=(?!\"data:image/png;base64,)|href=|@import|url\(|<script", html)


def test_hostile_text_in_any_field_is_shown_as_text(documents: Documents, error: ErrorDocument) -> None:
    settings = config.Config(
        registry=config.RegistryConfig(metric=HOSTILE, model_name=HOSTILE), data=config.DataConfig(source=HOSTILE)
    )
    interval = Interval(value=0.5, low=0.4, high=0.6)
    attacked = Evaluation.model_validate(
        with_hostile_text(documents.evaluation.to_dict())
        | {
            "metrics": {HOSTILE: interval.model_dump(), "other": interval.model_dump()},
            "slices": {HOSTILE: Slice(num_samples=1, metrics={HOSTILE: 0.5}).model_dump()},
            "baselines": {HOSTILE: {HOSTILE: 0.1}},
            "examples": [
                {"key": HOSTILE, "is_worst": w, "metrics": {HOSTILE: 1}, "shown": {HOSTILE: HOSTILE}, "picture": p}
                for w, p in [(True, HOSTILE), (False, '"onerror="x'), (False, "aGk=\n")]
            ],
        }
    )
    documents.history[-1][f"validation/{HOSTILE}"] = 0.5
    hostile_manifest = with_hostile_text(documents.manifest) | {
        "splits": {HOSTILE: documents.manifest["splits"]["train"]},
        "baselines": {HOSTILE: {HOSTILE: HOSTILE}},
    }
    hostile = Documents(
        settings,
        Completion.model_validate(with_hostile_text(documents.completion.to_dict())),
        documents.history,
        attacked,
        Registration.model_validate(with_hostile_text(documents.registration.to_dict()) | {"goal": "minimize"}),
        hostile_manifest,
    )
    attacked_error = ErrorDocument.salvage(with_hostile_text(error.to_dict()))
    pages = all_pages(hostile, attacked_error)
    for name, html in pages.items():
        reader = check_harmless(html)
        assert "{{ 7 * 7 }}" in reader.shown
        assert "<script>alert('x')</script><img src=x" in reader.shown, name
    check_harmless(
        reports.render_section(
            reports.describe_failure(attacked_error, HOSTILE, Situation(Place.LAPTOP, HOSTILE, HOSTILE, HOSTILE)),
            HOSTILE,
        )
    )


def test_characters_that_xml_forbids_and_text_that_reads_backwards_are_replaced(registration: Registration) -> None:
    html = reports.render_section(
        reports.describe_registration(
            config.Config(), registration.model_copy(update={"reason": "zero\x00 escape\x1b bidi\u202e lone\ud800"})
        ),
        config.Config().run.name,
    )
    reader = check_harmless(html)
    assert "Zero\ufffd escape\ufffd bidi\ufffd lone\ufffd." in reader.shown
    html.encode()


def test_passwords_in_uris_are_not_shown(registration: Registration) -> None:
    settings = config.parse("tracking: {uri: 'https://ana:hunter2@mlflow/x'}")
    html = reports.render_page(
        reports.compose_run_page(
            settings, registration=registration.model_copy(update={"tracking_uri": settings.tracking.uri})
        )
    )
    assert "hunter2" not in html
    assert "https://mlflow/x" in html


def test_a_training_of_a_hundred_thousand_steps_makes_a_small_page(
    settings: config.Config,
    completion: Completion,
    evaluation: Evaluation,
    registration: Registration,
    manifest: dict[str, Any],
) -> None:
    history = make_history(100_000)
    for point in history[::1000]:
        point["loss"] = float("nan")
    html = reports.render_page(
        reports.compose_run_page(
            settings,
            manifest=manifest,
            completion=completion,
            history=history,
            evaluation=evaluation,
            registration=registration,
        )
    )
    assert len(html.encode()) < 300_000
    assert "100 values not finite" in html


def test_the_training_page_shows_its_figures(pages: Pages) -> None:
    shown = Reader(pages["training"]).shown
    assert "Trained 400 steps to a loss of 1.588." in shown
    for figure in ("12,800", "287", "3 min 20 s", "1.86M", "clipped above 1", "mean of 17 points"):
        assert figure in shown


def test_the_evaluation_page_says_which_is_better_and_by_how_much(pages: Pages) -> None:
    shown = Reader(pages["evaluation"]).shown
    assert "Bits per byte 2.337, lower is better." in shown
    assert "Better than zlib -9 (2.512) by 0.175; better than order-2 (2.946) by 0.609." in shown
    assert "The 95% interval is 2.289 to 2.383, from 187 independent groups with 5,321 samples." in shown
    assert "cat taken for dog (9 of 100); dog taken for cat (4 of 100)" in shown


def test_slices_come_worst_first_for_either_goal(settings: config.Config, evaluation: Evaluation) -> None:
    def order(html: str) -> list[str]:
        return re.findall(r'class="row">(asyncio|json|ctypes)<', html)

    assert order(reports.render_section(reports.describe_evaluation(settings, evaluation), settings.run.name)) == [
        "asyncio",
        "json",
        "ctypes",
    ]
    maximize = settings.model_copy(update={"registry": config.RegistryConfig(goal="maximize")})
    html = reports.render_section(reports.describe_evaluation(maximize, evaluation), maximize.run.name)
    assert order(html) == ["ctypes", "json", "asyncio"]
    assert "Worse than zlib -9 (2.512) by 0.175" in Reader(html).shown


def test_of_many_slices_the_worst_and_the_best_are_drawn(settings: config.Config, evaluation: Evaluation) -> None:
    slices = {f"slice-{i:03d}": Slice(num_samples=1, metrics={"bits_per_byte": float(i)}) for i in range(200)}
    html = reports.render_section(
        reports.describe_evaluation(settings, evaluation.model_copy(update={"slices": slices})), settings.run.name
    )
    assert re.findall(r'class="row">slice-(\d+)<', html) == [
        f"{i:03d}" for i in [*range(199, 179, -1), *range(9, -1, -1)]
    ]
    assert "30 of 200" in html


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        (2.34, "Not distinguishable from order-2 (2.340)"),
        (2.2, "Worse than order-2 (2.200) by 0.137"),
        (float("nan"), "Order-2 is NaN"),
    ],
)
def test_a_baseline_is_put_into_words(
    settings: config.Config, evaluation: Evaluation, baseline: float, said: str
) -> None:
    changed = evaluation.model_copy(update={"baselines": {"bits_per_byte": {"order-2": baseline}}})
    assert (
        said in Reader(reports.render_section(reports.describe_evaluation(settings, changed), settings.run.name)).shown
    )


def test_without_a_known_goal_nothing_is_called_better(evaluation: Evaluation) -> None:
    settings = config.Config(registry=config.RegistryConfig(metric="accuracy"))
    shown = Reader(reports.render_section(reports.describe_evaluation(settings, evaluation), settings.run.name)).shown
    assert "Bits per byte 2.337." in shown
    assert "Lower than zlib -9 (2.512) by 0.175" in shown
    assert "better" not in shown.lower()


def test_too_many_classes_become_a_list_of_confusions(settings: config.Config, evaluation: Evaluation) -> None:
    labels = [f"class {i}" for i in range(100)]
    matrix = [[50 if i == j else int(j == i + 1) * i for j in range(100)] for i in range(100)]
    html = reports.render_section(
        reports.describe_evaluation(
            settings, evaluation.model_copy(update={"confusion": Confusion(labels=labels, matrix=matrix)})
        ),
        settings.run.name,
    )
    assert "Most frequent confusions class true class taken for" not in html
    assert "class 98 class 99 98 148" in Reader(html).shown
    assert "<rect" not in html


def test_a_matrix_that_does_not_fit_its_labels_is_left_out(settings: config.Config, evaluation: Evaluation) -> None:
    broken = Confusion(labels=["a", "b"], matrix=[[1, 2]])
    assert "Confusion" not in reports.render_section(
        reports.describe_evaluation(settings, evaluation.model_copy(update={"confusion": broken})), settings.run.name
    )


def test_the_registration_page_starts_with_the_decision_and_its_reason(
    settings: config.Config, registration: Registration
) -> None:
    shown = Reader(
        reports.render_section(reports.describe_registration(settings, registration), settings.run.name)
    ).shown
    assert "stdlib-lm version 7 is the new champion." in shown
    assert "The interval of the improvement is above 0." in shown
    assert "+0.061" in shown and "+0.043 to +0.079" in shown and "no change" in shown
    lost = registration.model_copy(update={"promoted": False})
    assert (
        "stdlib-lm version 7 is registered; version 5 stays champion."
        in Reader(reports.render_section(reports.describe_registration(settings, lost), settings.run.name)).shown
    )
    nobody = {"champion_version": None, "champion": None, "improvement": None}
    shown = Reader(
        reports.render_section(
            reports.describe_registration(settings, lost.model_copy(update=nobody)), settings.run.name
        )
    ).shown
    assert "is registered; there is no champion." in shown
    assert "Improvement over" not in shown


def test_the_effect_that_the_gate_needs_is_drawn(registration: Registration) -> None:
    settings = config.Config(registry=config.RegistryConfig(min_effect=0.01))
    assert (
        "needed 0.01"
        in Reader(
            reports.render_section(reports.describe_registration(settings, registration), settings.run.name)
        ).shown
    )


def test_the_run_page_has_every_part_and_each_fact_once(pages: Pages) -> None:
    shown = Reader(pages["run"]).shown
    for part in ("Registration", "Evaluation", "Training", "Data", "Provenance", "Configuration"):
        assert part in shown
    assert "3 shards: 329,735 samples for training, 5,321 samples for validation, 192 MB." in shown
    assert "zlib -9 2.51" in shown
    assert f'title="{DIGESTS["data"]}"' in pages["run"]
    assert pages["run"].count(f'title="{DIGESTS["data"]}"') == 1
    assert DIGESTS["data"][:13] not in shown
    assert "global_batch_size: 32" in shown


def test_parts_that_are_not_there_yet_are_left_out(settings: config.Config, history: list[dict[str, Any]]) -> None:
    assert (
        "Nothing has been recorded yet."
        in Reader(check_and_return(reports.render_page(reports.compose_run_page(settings)))).shown
    )
    shown = Reader(
        check_and_return(reports.render_page(reports.compose_run_page(settings, history=history[:230])))
    ).shown
    assert "Training is not complete: last recorded step 230 of 400." in shown
    assert "Evaluation" not in shown


def check_and_return(html: str) -> str:
    check_harmless(html)
    return html


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{}],
        [{"loss": 1.0}],
        [{"step": 1}],
        [{"step": 1, "loss": None, "gradient_norm": "big"}],
        [{"step": 3, "loss": 1.0}, {"step": 1, "loss": 2.0}, {"step": 3, "loss": 9.0}],
        [{"step": float("nan"), "loss": 1.0}, {"step": True, "loss": 1.0}],
    ],
)
def test_a_history_with_missing_or_odd_points_is_no_obstacle(
    settings: config.Config, completion: Completion, history: list[dict[str, Any]]
) -> None:
    check_harmless(
        reports.render_section(
            reports.describe_training(settings, completion, history), settings.run.name, settings.to_yaml()
        )
    )
    check_harmless(
        reports.render_section(
            reports.describe_training(settings, None, history), settings.run.name, settings.to_yaml()
        )
    )


@pytest.mark.parametrize(("first", "start"), [(10, "0"), (300, "300")])
def test_the_step_axis_starts_at_zero_if_the_history_starts_near_it(
    settings: config.Config, first: int, start: str
) -> None:
    html = reports.render_section(
        reports.describe_training(settings, None, [{"step": first, "loss": 2.0}, {"step": 400, "loss": 1.0}]),
        settings.run.name,
        settings.to_yaml(),
    )
    assert f'<text x="0%" y="228" class="tick" text-anchor="middle">{start}</text>' in html


def test_of_a_step_that_was_repeated_the_later_record_counts(settings: config.Config) -> None:
    history = [{"step": 3, "loss": 1.0}, {"step": 1, "loss": 2.0}, {"step": 3, "loss": 9.0}]
    assert "from 2.000 at step 1 to 9.000 at step 3" in reports.render_section(
        reports.describe_training(settings, None, history), settings.run.name, settings.to_yaml()
    )


@pytest.mark.parametrize(
    "document", [{}, {"splits": []}, {"splits": {"train": [1]}, "sample_schema": 3, "baselines": {"x": 1}}]
)
def test_a_manifest_with_other_contents_is_no_obstacle(settings: config.Config, document: dict[str, Any]) -> None:
    check_harmless(reports.render_page(reports.compose_run_page(settings, manifest=document)))


@pytest.mark.parametrize(
    ("failure", "advice", "command"),
    [
        (
            lambda: DataError("bad shard", fix="delete it"),
            "Delete it. Then go on",
            "kftrain run --resume 's3://bucket/runs/my run'",
        ),
        (
            lambda: HangError("no progress"),
            "raise launch.timeout_seconds. Go on",
            "kftrain run --resume 's3://bucket/runs/my run'",
        ),
        (lambda: ConfigError("unknown key"), "Correct the setting that is named.", "kftrain run"),
        (lambda: FencedError("fenced"), "nothing is lost", None),
        (
            lambda: DivergedError("loss is NaN"),
            "Lower optimizer.learning_rate",
            "kftrain run --set optimizer.learning_rate=RATE",
        ),
        (
            lambda: ZeroDivisionError("oops"),
            "traceback is in the log",
            "kftrain run --resume 's3://bucket/runs/my run'",
        ),
    ],
)
def test_a_failure_says_what_to_do_next(failure: Callable[[], Exception], advice: str, command: str | None) -> None:
    html = reports.render_section(
        reports.describe_failure(
            ErrorDocument.of(failure()), "train", Situation(Place.LAPTOP, "s3://bucket/runs/my run")
        ),
        "train",
    )
    reader = check_harmless(html)
    assert advice in reader.shown
    assert (command in reader.shown) if command else ("<pre" not in html)


def test_a_failed_run_can_be_resumed_in_the_ui(error: ErrorDocument) -> None:
    shown = Reader(
        reports.render_section(
            reports.describe_failure(error, "train", replace(AT_HOME, place=Place.KUBEFLOW)), "train"
        )
    ).shown
    assert "start a run with nothing but resume_run set to /data/runs/stdlib-lm-1" in shown


def test_at_home_nobody_is_sent_to_kubeflow_and_the_log_is_named(error: ErrorDocument) -> None:
    shown = Reader(reports.render_section(reports.describe_failure(error, "train", AT_HOME), "train")).shown
    assert "Kubeflow" not in shown and "/data/logs/1.log" in shown


def test_a_failure_without_any_field_is_still_reported() -> None:
    assert (
        "Train failed: it left no message."
        in Reader(
            check_and_return(
                reports.render_section(
                    reports.describe_failure(ErrorDocument(), "train", Situation(Place.LAPTOP)), "train"
                )
            )
        ).shown
    )
