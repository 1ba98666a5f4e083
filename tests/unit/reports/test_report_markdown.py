from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from kftrain import config, reports
from kftrain.errors import DataError
from kftrain.reports.content import Fact, ReportSection, Table
from kftrain.reports.markdown import escape, render_markdown
from kftrain.reports.wording import clean
from kftrain.run.advice import Place, Situation
from kftrain.run.documents import Completion, Evaluation, Example, Registration, Slice
from kftrain.run.error import ErrorDocument

HOSTILE = "a|b`c`<script>x</script>\n# head\n[l](http://e) ![i](x) **b** &amp; \\ ~~s~~ | --- |"
special = st.text(alphabet="ab1.-+=#|`*_<>[]()!~\\&{}$^: \n\t", max_size=25)
quick = settings(derandomize=True, max_examples=200, deadline=None)


def rendered(markdown: str) -> str:
    """HTML of an independent renderer, with raw HTML let through so that none can hide."""
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown)


def plain(html: str) -> str:
    text = re.sub(r"<[^>]+>", "", html)
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        text = text.replace(entity, character)
    return text


@quick
@given(special)
def test_escaped_text_is_rendered_as_itself(text: str) -> None:
    html = rendered(f"{escape(text)}\n")
    assert set(re.findall(r"<(\w+)", html)) <= {"p"}
    assert plain(html).strip() == " ".join(text.split())


@quick
@given(special, special)
def test_text_stays_in_its_cell(first: str, second: str) -> None:
    section = ReportSection("S", "h", tables=[Table("T", ["a", "b"], [[first, second]])])
    html = rendered(render_markdown(section))
    cells = [plain(cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", html, flags=re.DOTALL)]
    assert cells == [" ".join(first.split()), " ".join(second.split())]


@quick
@given(special)
def test_an_identifier_stays_one_code_span(text: str) -> None:
    html = rendered(render_markdown(ReportSection("S", "h", facts=[Fact("name", text, code=True)])))
    (code,) = re.findall(r"<code>(.*?)</code>", html, flags=re.DOTALL)
    assert plain(code).strip() == " ".join(clean(text).replace("`", "'").split())
    assert set(re.findall(r"<(\w+)", html)) == {"h2", "ul", "li", "code"}


def test_hostile_text_in_documents_stays_text(
    evaluation: Evaluation, registration: Registration, completion: Completion, manifest: dict[str, Any]
) -> None:
    settings = config.Config()
    attacked = evaluation.model_copy(
        update={
            "slices": {HOSTILE: Slice(num_samples=1, metrics={"bits_per_byte": 1.0})},
            "baselines": {"bits_per_byte": {HOSTILE: 1.0}},
            "export_uri": HOSTILE,
            "examples": [Example(key=HOSTILE, is_worst=True, metrics={HOSTILE: 1.0}, shown={HOSTILE: HOSTILE})],
        }
    )
    pages = [
        reports.render_markdown(reports.describe_evaluation(settings, attacked)),
        reports.render_markdown(
            reports.describe_registration(
                settings, registration.model_copy(update={"reason": HOSTILE, "tracking_uri": HOSTILE})
            )
        ),
        reports.render_markdown(
            reports.describe_training(
                settings, completion.model_copy(update={"run_id": HOSTILE}), [{"step": 1, f"validation/{HOSTILE}": 1.0}]
            )
        ),
        reports.render_markdown(
            reports.describe_shards(manifest | {"source": HOSTILE, "baselines": {HOSTILE: {HOSTILE: HOSTILE}}})
        ),
        reports.render_markdown(
            reports.describe_failure(
                ErrorDocument.of(DataError(HOSTILE, where=HOSTILE, value=HOSTILE, fix=HOSTILE)),
                HOSTILE,
                Situation(Place.LAPTOP, HOSTILE, HOSTILE),
            )
        ),
    ]
    allowed = {"h2", "p", "ul", "li", "code", "pre", "strong", "table", "thead", "tbody", "tr", "th", "td"}
    for page in pages:
        html = rendered(page)
        assert set(re.findall(r"<(\w+)", html)) <= allowed
        assert html.count("<h2>") == 1
        assert "<script>x</script>" in plain(html)


def test_the_evaluation_is_tables(evaluation: Evaluation) -> None:
    text = reports.render_markdown(reports.describe_evaluation(config.Config(), evaluation))
    assert "| this model | 2.337 | 2.289 to 2.383 |" in text
    assert "| zlib -9 | 2.512 |   |" in text
    assert "| asyncio | 2.554 |   | 67 |" in text
    assert "| cat | 90 | 9 | 1 |" in text


def test_the_training_is_a_summary_of_each_curve(completion: Completion, history: list[dict[str, Any]]) -> None:
    text = reports.render_markdown(reports.describe_training(config.Config(), completion, history))
    assert text.startswith("## Training: Trained 400 steps to a loss of 1.588.\n")
    losses = [point["loss"] for point in history]
    figures = " | ".join(f"{value:.3f}" for value in (losses[0], min(losses), max(losses), losses[-1]))
    assert f"| training | {figures} |" in text


def test_the_shards_are_a_table_of_splits(manifest: dict[str, Any]) -> None:
    text = reports.render_markdown(reports.describe_shards(manifest))
    assert "| train | 2 | 329,735 | 2,422 | 128 MB |" in text
    assert "| tokens | uint8 | 257 |" in text


def test_a_command_is_a_code_block() -> None:
    text = reports.render_markdown(
        reports.describe_failure(
            ErrorDocument.of(DataError("bad shard", fix="delete it")), "shard", Situation(Place.LAPTOP, "/runs/r-1")
        )
    )
    assert "## Failure: Shard failed: bad shard." in text
    assert "```\nkftrain run --resume /runs/r-1 --set data.source=SOURCE\n```" in text


@pytest.mark.parametrize("wide", [12, 40])
def test_a_table_too_wide_for_a_page_is_left_out(wide: int) -> None:
    text = render_markdown(ReportSection("S", "h", tables=[Table("T", [""] * wide, [["1"] * wide])]))
    assert ("**T**" in text) == (wide == 12)
