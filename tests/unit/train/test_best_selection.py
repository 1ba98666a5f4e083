"""Which evaluation is the best where the checkpoint of a better one could not be written."""

from types import SimpleNamespace

from kftrain import config
from kftrain.train.best import BestCheckpoint


def test_the_best_one_before_is_the_best_again_where_the_checkpoint_of_a_better_one_fails():
    overrides = ["checkpoint.keep_best=loss", "checkpoint.keep_best_goal=minimize", "evaluate.interval_steps=1"]
    best = BestCheckpoint(config.parse("{}", overrides), SimpleNamespace(is_main=True), "loss")
    for step, value in ((1, 0.5), (2, 0.6), (3, 0.4)):
        best.take(step, value)
    best.forget(3)
    assert best.selection is not None and (best.selection.step, best.selection.value) == (1, 0.5)
