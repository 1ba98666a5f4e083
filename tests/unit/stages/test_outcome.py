import json
import math

import pytest

from kftrain.run.documents import Confusion
from kftrain.stages.outcome import Outcome, finite_metrics, save


class FakeArtifact:
    def __init__(self, path):
        self.path = str(path)


class FakeMetrics:
    def __init__(self):
        self.logged = {}

    def log_metric(self, metric, value):
        self.logged[metric] = value


class FakeConfusion(FakeArtifact):
    logged = None

    def log_confusion_matrix(self, categories, matrix):
        self.logged = (categories, matrix)


def test_the_summary_keeps_its_order_so_that_its_first_lines_say_what_happened(tmp_path):
    outcome = Outcome("run", {"result": "trained", "a": 1})
    returned = save(outcome, FakeArtifact(tmp_path / "new" / "summary"))
    text = (tmp_path / "new" / "summary").read_text()
    assert returned == "run"
    assert text.splitlines()[1].strip() == '"result": "trained",'
    assert json.loads(text) == outcome.summary


def test_metrics_are_flat_finite_floats_and_nothing_else():
    metrics = FakeMetrics()
    save(Outcome("run", {}, {"loss": 1, "nan": math.nan, "inf": math.inf}), metrics=metrics)
    assert metrics.logged == {"loss": 1.0}
    assert all(type(value) is float for value in metrics.logged.values())
    assert finite_metrics({"a": None, "b": True}) == {"b": 1.0}


def test_texts_go_to_the_artifacts_that_there_are(tmp_path):
    outcome = Outcome("run", {}, html="<p>", markdown="#")
    save(outcome, html=FakeArtifact(tmp_path / "h"), markdown=FakeArtifact(tmp_path / "m"))
    assert ((tmp_path / "h").read_text(), (tmp_path / "m").read_text()) == ("<p>", "#")


def test_the_page_of_versions_is_never_an_empty_box(tmp_path):
    for page, text in (("", "no other version"), ("<p>", "<p>")):
        save(Outcome("run", {}, comparison=page), comparison=FakeArtifact(tmp_path / "c"))
        assert text in (tmp_path / "c").read_text()


@pytest.mark.parametrize(
    ("confusion", "text"),
    [(None, "no classes"), (Confusion(labels=["a", "b"], matrix=[[3, 1], [0, 4]]), "2 classes")],
)
def test_a_confusion_matrix_is_logged_where_there_is_one_and_its_artifact_is_never_an_empty_box(
    confusion, text, tmp_path
):
    artifact = FakeConfusion(tmp_path / "confusion")
    save(Outcome("run", {}, confusion=confusion), confusion=artifact)
    assert artifact.logged == (None if confusion is None else (["a", "b"], [[3, 1], [0, 4]]))
    assert text in (tmp_path / "confusion").read_text()
