"""Calibration, curves and figures by class against scikit-learn on the same scores, rounded to their bins."""

import numpy as np
import pytest
import torch
from sklearn import calibration, metrics

from kftrain.errors import UserCodeError
from kftrain.evaluate import curves
from kftrain.run.documents import Confusion
from kftrain.tasks import histograms
from kftrain.tasks.classification import Classification

NUM_ROWS = 3000


class Digits(Classification):
    def schema(self):
        raise NotImplementedError


def answers(num_classes, seed=0):
    """Logits that are right more often than not, with a rare last class, and labels."""
    generator = np.random.default_rng(seed)
    share = np.r_[np.ones(num_classes - 1), 0.2]
    labels = generator.choice(num_classes, NUM_ROWS, p=share / share.sum())
    logits = generator.normal(size=(NUM_ROWS, num_classes)) * 3
    logits[np.arange(NUM_ROWS), labels] += 2
    return torch.tensor(logits, dtype=torch.float32), torch.tensor(labels)


def tallied(logits, labels, num_parts=1):
    task = Digits(num_classes=logits.shape[1])
    parts = zip(logits.chunk(num_parts), labels.chunk(num_parts), strict=True)
    found = [task.tallies(output, {"label": label}) for output, label in parts]
    return {name: sum(each[name] for each in found).numpy() for name in found[0]}


def binned_scores(logits):
    """Of each class the numbers of the bins, as thresholds see the scores."""
    p = torch.softmax(logits.double(), dim=1).numpy()
    log_odds = np.log(p) - np.log1p(-p)
    return np.floor(np.clip((log_odds + 16) / 32 * 1024, 0, 1023))


@pytest.mark.parametrize("num_classes", [2, 5])
def test_curves_and_areas_are_those_of_scikit_learn_on_binned_scores(num_classes):
    logits, labels = answers(num_classes)
    table, scores = tallied(logits, labels)["scores"], binned_scores(logits)
    assert table.sum() == NUM_ROWS * num_classes and table[:, 1].sum() == NUM_ROWS
    for number in range(num_classes):
        own = labels.numpy() == number
        across, up, area = curves.roc(table[number])
        expected = metrics.roc_curve(own, scores[:, number], drop_intermediate=False)
        kept = np.flatnonzero(np.diff(across + up, prepend=-1.0))
        np.testing.assert_allclose(np.c_[across, up][kept], np.c_[expected[0], expected[1]], atol=1e-12)
        assert area == pytest.approx(metrics.roc_auc_score(own, scores[:, number]), abs=1e-9)
        recall, precision, average = curves.precision_recall(table[number])
        assert average == pytest.approx(metrics.average_precision_score(own, scores[:, number]), abs=1e-9)
        expected = metrics.precision_recall_curve(own, scores[:, number])
        points = {(round(r, 9), round(p, 9)) for r, p in zip(expected[1], expected[0], strict=True)} - {(0.0, 1.0)}
        best = max(p for r, p in points if r == 1.0)
        points = {(r, p) for r, p in points if r < 1.0 or p == best}
        assert points <= {(round(r, 9), round(p, 9)) for r, p in zip(recall, precision, strict=True)}
    assert curves.roc(table[0])[2] == pytest.approx(
        metrics.roc_auc_score(labels.numpy() == 0, logits.softmax(1)[:, 0].numpy()), abs=2e-3
    ), "the bins cost hardly anything"


def test_the_calibration_error_is_the_mean_distance_of_scikit_learns_curve():
    logits, labels = answers(4)
    confidence, prediction = torch.softmax(logits.double(), dim=1).max(dim=1)
    right = (prediction == labels).numpy()
    found = curves.calibration_of(tallied(logits, labels)["reliability"])
    edges = np.linspace(0, 1, 16)
    members = np.digitize(confidence.numpy(), edges[1:-1])
    accuracy, mean = calibration.calibration_curve(right, confidence.numpy(), n_bins=15, strategy="uniform")
    counts = np.bincount(members, minlength=15)
    counts = counts[counts > 0]
    assert [each.num_samples for each in found.bins] == counts.tolist()
    filled = np.unique(members)
    assert [(each.low, each.high) for each in found.bins] == list(zip(edges[filled], edges[filled + 1], strict=True))
    np.testing.assert_allclose([each.accuracy for each in found.bins], accuracy, atol=1e-9)
    np.testing.assert_allclose([each.confidence for each in found.bins], mean, atol=1e-9)
    expected = (counts * np.abs(accuracy - mean)).sum() / NUM_ROWS
    assert found.error == pytest.approx(expected, abs=1e-9) and 0.01 < found.error < 0.5


def test_figures_by_class_are_those_of_scikit_learn():
    logits, labels = answers(5)
    table, predictions = tallied(logits, labels)["scores"], logits.argmax(dim=1)
    matrix = metrics.confusion_matrix(labels, predictions)
    found = curves.class_figures(Confusion(labels=list("abcde"), matrix=matrix.tolist()), table)
    precision, recall, f1, support = metrics.precision_recall_fscore_support(labels, predictions)
    for name, expected in (("precision", precision), ("recall", recall), ("f1", f1), ("num_samples", support)):
        np.testing.assert_allclose([getattr(each, name) for each in found], expected, atol=1e-9)
    whole = curves.whole_figures(found, None)
    assert whole["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(labels, predictions), abs=1e-9)
    assert whole["macro_f1"] == pytest.approx(metrics.f1_score(labels, predictions, average="macro"), abs=1e-9)
    areas = [metrics.roc_auc_score(labels == number, binned_scores(logits)[:, number]) for number in range(5)]
    assert whole["roc_auc"] == pytest.approx(np.mean(areas), abs=1e-9)


def test_parts_of_any_size_add_up_to_the_same_numbers():
    logits, labels = answers(3)
    one = tallied(logits, labels)
    for num_parts in (2, 7, 100):
        assert all(np.array_equal(one[name], part) for name, part in tallied(logits, labels, num_parts).items())


def test_of_two_classes_the_curves_are_those_of_the_second():
    logits, labels = answers(2)
    table = tallied(logits, labels)["scores"]
    found = curves.curves_of(["no", "yes"], table)
    assert [(each.kind, each.label) for each in found] == [("roc", "yes"), ("precision_recall", "yes")]
    assert all(len(each.points) <= curves.MAX_CURVE_POINTS for each in found)
    assert found[0].points[0] == (0.0, 0.0) and found[0].points[-1] == (1.0, 1.0)
    classes = curves.class_figures(Confusion(labels=["no", "yes"], matrix=[[1, 0], [0, 1]]), table)
    assert curves.whole_figures(classes, None)["roc_auc"] == classes[1].roc_auc


def test_of_many_classes_the_hardest_are_drawn():
    logits, labels = answers(9)
    logits[:, 4] += torch.randn(NUM_ROWS, generator=torch.Generator().manual_seed(0)) * 20
    found = curves.curves_of([str(number) for number in range(9)], tallied(logits, labels)["scores"])
    of_roc = [each for each in found if each.kind == "roc"]
    assert len(of_roc) == curves.MAX_CURVES and of_roc[0].label == "4"


def test_a_class_that_the_data_does_not_have_has_no_figures():
    logits, labels = answers(3)
    labels[labels == 2] = 0
    table = tallied(logits, labels)["scores"]
    assert curves.roc(table[2]) is None and curves.precision_recall(table[2]) is None
    (found,) = curves.class_figures(Confusion(labels=["x"], matrix=[[0]]), None)
    assert (found.precision, found.recall, found.f1, found.roc_auc) == (None, None, None, None)
    assert curves.whole_figures([found], None) == {}


def test_numbers_that_are_none_do_not_break_the_histograms():
    logits, labels = answers(3)
    logits[0], logits[1, 0] = float("nan"), float("inf")
    assert tallied(logits, labels)["scores"].sum() == 3 * NUM_ROWS


def test_very_many_classes_have_no_curves_and_an_own_output_has_no_tallies():
    task = Digits(num_classes=histograms.MAX_CLASSES + 1)
    logits = torch.zeros(4, histograms.MAX_CLASSES + 1)
    assert task.tallies(logits, {"label": torch.zeros(4)}).keys() == {"reliability"}

    class Own(Digits):
        def statistics(self, output, batch):
            return {}

    assert Own(num_classes=2).tallies({"any": "thing"}, {}) == {}


def test_tallies_of_another_shape_are_the_users_error():
    with pytest.raises(UserCodeError, match=r"task.tallies scores: must be \[3, 2, bins\]"):
        curves.require_shape({"scores": np.zeros((2, 2, 8))}, "scores", 3, 2)
    assert curves.require_shape({}, "scores", 3, 2) is None
