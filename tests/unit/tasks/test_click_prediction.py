"""Click prediction: its area under the curve against scikit-learn's, its blocks, and the clicks that are made up."""

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from kftrain.data.schema import SourcePart
from kftrain.models.click_network import ClickNetwork
from kftrain.sharding.sources.clicks import FIELD_STEP, ClicksSource
from kftrain.tasks.click_prediction import BLOCK_ROWS, ClickPrediction

SMALL = ClicksSource(num_rows=20_000, num_fields=3, num_keys=50)

pytestmark = pytest.mark.timeout(60)


def compute_metrics(logits, labels):
    task = ClickPrediction(num_fields=3)
    rows = task.statistics(torch.from_numpy(logits), {"label": torch.from_numpy(labels)})
    return task.metrics({name: values.sum().numpy() for name, values in rows.items()})


@pytest.mark.parametrize(("step", "tolerance"), [(0.125, 1e-12), (1e-6, 1e-3)])
def test_the_area_is_scikit_learns(step, tolerance):
    """Exact for scores that are rounded to an eighth: those in the middle of a bin, too."""
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 2, 4000)
    logits = np.round(generator.normal(size=4000) + labels, 6) // step * step + step / 2
    ours = compute_metrics(logits, labels)
    assert ours["auc"] == pytest.approx(roc_auc_score(labels, logits), abs=tolerance)
    assert ours["log_loss"] == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-logits))), rel=1e-9)


def test_scores_beyond_the_bins_count_as_the_outermost_and_one_class_alone_has_no_area():
    labels = np.array([0, 0, 1, 1])
    assert compute_metrics(np.array([-1e9, 1e9, 1e9, 1e9]), labels)["auc"] == 0.75
    assert np.isnan(compute_metrics(np.zeros(2), np.zeros(2, np.int64))["auc"])


def test_metrics_are_elementwise_over_resamples():
    task = ClickPrediction(num_fields=3)
    logits, labels = torch.randn(50, dtype=torch.float64), torch.arange(50) % 2
    rows = {name: values.numpy() for name, values in task.statistics(logits, {"label": labels}).items()}
    both = task.metrics({name: np.array([values.sum(), 3 * values.sum()]) for name, values in rows.items()})
    assert both["auc"].shape == (2,) and both["auc"][0] == pytest.approx(both["auc"][1])


def test_the_teacher_is_the_bound_and_the_same_seed_gives_the_same_clicks():
    ids, labels, log_odds = SMALL.draw(0, 8192)
    again = ClicksSource(num_rows=20_000, num_fields=3, num_keys=50).draw(0, 8192)
    other = ClicksSource(num_rows=20_000, num_fields=3, num_keys=50, seed=1).draw(0, 8192)
    assert np.array_equal(ids, again[0]) and np.array_equal(labels, again[1]) and not np.array_equal(ids, other[0])
    assert roc_auc_score(labels, log_odds) > 0.75
    assert log_loss(labels, 1 / (1 + np.exp(-log_odds))) < log_loss(labels, np.full(len(labels), labels.mean()))
    ranks = ids - FIELD_STEP * np.arange(3)
    assert ranks.min() == 1 and ranks.max() == 50
    counts = np.bincount(ranks.reshape(-1), minlength=51)[1:]
    assert counts[0] > 3 * counts[20] > 3 * counts[49] * 0.9, "a small rank is drawn more often"


def test_all_records_come_once_in_pieces():
    source = ClicksSource(num_rows=8200, num_fields=2, num_keys=9)
    records = list(source.read(SourcePart()))
    assert [record.key for record in records] == [f"click-{number:08d}" for number in range(8200)]
    assert np.array_equal(records[8195].fields["ids"], source.draw(8192, 8)[0][3])


def test_training_blocks_hold_many_rows_and_validation_blocks_one():
    task = ClickPrediction(num_fields=3)
    records = list(ClicksSource(num_rows=BLOCK_ROWS + 5, num_fields=3, num_keys=50).records())
    blocks = list(task.encode(records, "train"))
    assert [block.num_rows for block in blocks] == [BLOCK_ROWS, 5]
    assert np.array_equal(blocks[1].arrays["ids"][4], records[-1].fields["ids"])
    assert [block.num_rows for block in task.encode(records[:3], "validation")] == [1, 1, 1]


def test_trivial_answers_are_scored():
    baselines = ClickPrediction(num_fields=1).baselines([{"label": np.array([0, 0, 0, 1])}])
    assert baselines["log_loss"]["share of clicks"] == pytest.approx(log_loss([0, 0, 0, 1], [0.25] * 4))
    assert baselines["auc"] == {"any constant": 0.5}


def test_a_network_gives_one_logit_a_row():
    network = ClickNetwork(num_fields=3, dim=4)

    class Ones:
        def pull(self, table, keys):
            return np.ones((len(keys), 4), np.float32)

    network.rows.attach(Ones())
    deep = network.layers(torch.ones(2, 12))[:, 0]
    torch.testing.assert_close(network(torch.tensor([[1, 2, 3], [3, 2, 9]])), deep + 3)
