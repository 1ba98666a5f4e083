"""The report of a dataset: counts, classes, sizes, findings and samples, from plain JSON."""

import base64
import json
import re
from typing import Any

import pytest
from report_documents import Documents

from kftrain import reports
from kftrain.core import storage
from kftrain.reports import content, shards
from kftrain.reports import evaluation as evaluations
from kftrain.run.documents import Evaluation, Example
from kftrain.tasks.shown import format_example

HOSTILE = "<script>x</script>|`*_"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\nnot really").decode()


@pytest.fixture
def described(manifest: dict[str, Any]) -> dict[str, Any]:
    split = {"num_records": 1000, "content_bytes": 20_480_000, "size_counts": {"0": 3, "14": 400, "15": 597}}
    return manifest | {
        "statistics": {
            "train": split | {"classes": {"label": {"0": 300, "1": 700}}},
            "validation": split | {"num_records": 100, "classes": {"label": {"1": 50, "2": 50}}},
        },
        "findings": {
            "content in both splits": {"count": 12, "first": ["b.txt = a.txt", "d.txt = c.txt"]},
            "empty": {"count": 3, "first": ["e.txt"]},
        },
    }


OVERVIEW = {
    "examples": [
        {"key": "dog/1.jpg", "split": "train", "shown": {"label": "1"}, "picture": PNG},
        {"key": "doc.txt", "split": "validation", "shown": {"text": "once upon a time"}, "picture": ""},
    ]
}


def cells(page: str) -> list[list[str]]:
    rows = re.findall(r"<tr.*?</tr>", page, flags=re.DOTALL)
    return [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row, flags=re.DOTALL)]
        for row in rows
    ]


def test_counts_classes_sizes_and_findings_are_shown(described: dict[str, Any]) -> None:
    rows = cells(reports.render_section(reports.describe_shards(described, OVERVIEW), "run"))
    assert ["1", "700 (70.0 %)", "50 (50.0 %)"] in rows and ["0", "300 (30.0 %)", "0 (0.0 %)"] in rows
    assert rows.index(["1", "700 (70.0 %)", "50 (50.0 %)"]) < rows.index(["0", "300 (30.0 %)", "0 (0.0 %)"])
    assert ["content in both splits", "12", "b.txt = a.txt, d.txt = c.txt"] in rows
    assert ["empty", "3", "3"] in rows
    assert any(row[:2] == ["train", "1,000"] for row in rows)


def test_copies_in_the_validation_split_are_said_in_a_sentence(described: dict[str, Any]) -> None:
    for page in (
        reports.render_section(reports.describe_shards(described), "run"),
        reports.render_markdown(reports.describe_shards(described)),
    ):
        assert "12 validation records of the training split" in page
    assert "look too good" not in reports.render_markdown(reports.describe_shards({**described, "findings": {}}))


def test_samples_are_shown_with_pictures_and_texts(described: dict[str, Any]) -> None:
    page = reports.render_section(reports.describe_shards(described, OVERVIEW), "run")
    assert f"data:image/png;base64,{PNG}" in page and "once upon a time" in page
    text = reports.render_markdown(reports.describe_shards(described, OVERVIEW))
    assert "once upon a time" in text and PNG not in text


def test_only_the_largest_classes_are_named(described: dict[str, Any]) -> None:
    counts = {str(number): 1000 - number for number in range(60)}
    described["statistics"]["train"]["classes"] = {"label": counts}
    rows = cells(reports.render_section(reports.describe_shards(described), "run"))
    assert any(row[0] == "36 others" for row in rows) and not any(row[0] == "59" for row in rows)


def test_what_strangers_wrote_stays_text(described: dict[str, Any]) -> None:
    described["statistics"]["train"]["classes"] = {HOSTILE: {HOSTILE: 3}}
    described["findings"][HOSTILE] = {"count": 1, "first": [HOSTILE]}
    shown = {"key": HOSTILE, "split": HOSTILE, "shown": {HOSTILE: HOSTILE}, "picture": '"><script>y</script>'}
    page = reports.render_section(reports.describe_shards(described, {"examples": [shown]}), HOSTILE)
    assert "<script>" not in page


@pytest.mark.parametrize(
    "broken", [None, 3, "x", [], {"train": 3}, {"train": {"classes": 3, "size_counts": {"x": "y"}}}]
)
def test_what_is_missing_or_broken_is_left_out(manifest: dict[str, Any], broken: Any) -> None:
    page = reports.render_section(
        reports.describe_shards(manifest | {"statistics": broken, "findings": broken}, {"examples": broken}), "run"
    )
    assert "Splits" in page


def test_tokens_of_a_stream_are_not_added_to_its_documents(documents: Documents) -> None:
    stream = documents.manifest | {"sample_schema": {"fields": [{"name": "tokens", "dtype": "uint16", "shape": []}]}}
    page = reports.render_section(reports.describe_shards(stream), "run")
    assert "3 shards: 329,735 tokens for training, 5,321 documents for validation" in page
    assert [row[:3] for row in cells(page) if row[0] == "train"] == [["train", "2", "329,735 tokens"]]
    card = reports.render_model_card(documents.settings, stream, documents.completion, documents.evaluation)
    assert "329,735 tokens for training, 5,321 documents for validation" in card


def test_what_a_sample_shows_keeps_the_order_of_the_task_through_json() -> None:
    """As `overview.json` and `metrics.json` are written, whose keys are sorted."""
    found = format_example({"text": "once", "goes on": "upon", "label": 1}, "task.show")
    read = json.loads(storage.dump_json({"examples": [{"key": "k", "split": "train", **found}]}))
    (gallery,) = shards.describe_shards({}, read).galleries
    assert [fact.name for fact in gallery.samples[0].facts] == ["text", "goes on", "label"]
    example = Example.model_validate(json.loads(storage.dump_json({"key": "k", "is_worst": True, **found})))
    evaluated = Evaluation.model_construct(examples=[example])
    assert [fact.name for fact in evaluations._make_galleries(evaluated)[0].samples[0].facts] == [
        "text",
        "goes on",
        "label",
    ]


def test_code_is_shown_as_it_is_set_and_white_space_takes_no_page() -> None:
    texts = {
        "text": "def f():\n    return 1\n \n\n   \n\n\nx",
        "goes on": " \n" * 90,
        "the model writes": "if" + " " * 90,
    }
    facts = content.make_sample_facts(texts)
    assert [fact.value for fact in facts] == [
        "def f():\n    return 1\n\nx",
        "(180 \u00d7 white space)",
        "if" + " " * 12,
    ]
    assert all(fact.code for fact in facts)
    assert not any(fact.code for fact in content.make_sample_facts({"class": "cat (p = 0.9)", "predicted": "cat"}))
