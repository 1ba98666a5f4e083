"""The card of a model: short, in Markdown, and with the text of others as text."""

from __future__ import annotations

from report_documents import Documents

from kftrain import reports
from kftrain.run.documents import Interval, Slice


def test_a_card_says_what_it_was_made_of_how_good_it_is_and_where_not(documents: Documents) -> None:
    of = documents
    card = reports.render_model_card(of.settings, of.manifest, of.completion, of.evaluation)
    for part in (
        "# stdlib-lm",
        "## Data: stdlib",
        "329,735 samples for training, 5,321 samples for validation",
        "400 steps, 1.86M parameters, seed 0",
        "| train.steps | 400 |",
        "| bits\\_per\\_byte | 2.337 | 2.289 to 2.383 | zlib -9 2.512, order-2 2.946 |",
        "187 independent groups",
    ):
        assert part in card, part
    slices = card[card.index("## Slices") : card.index("## Limits")]
    assert slices.index("asyncio") < slices.index("json") < slices.index("ctypes")  # the worst first


def test_a_card_fits_into_the_description_of_a_version_and_escapes(documents: Documents) -> None:
    of = documents
    hostile = "<script>x</script> | [a](http://evil) `" * 20
    many = {f"{n} {hostile}": Slice(num_samples=3, metrics={"bits_per_byte": float(n)}) for n in range(100)}
    interval = Interval(value=0.5, low=0.4, high=0.6)
    evaluation = of.evaluation.model_copy(update={"slices": many, "metrics": {"bits_per_byte": interval}})
    card = reports.render_model_card(of.settings, of.manifest | {"source": hostile}, of.completion, evaluation)
    assert "<script" not in card.replace("\\<", "") and "the 10 worst of 100" in card
    assert len(reports.render_model_card(of.settings, of.manifest, of.completion, of.evaluation)) < 5000


def test_without_slices_or_a_known_goal_there_are_fewer_sections(documents: Documents) -> None:
    of = documents
    evaluation = of.evaluation.model_copy(update={"slices": {}, "num_groups": 7})
    card = reports.render_model_card(of.settings, of.manifest, of.completion, evaluation)
    assert "## Slices" not in card and "a person decides" in card
