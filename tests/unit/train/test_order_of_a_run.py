"""A run that release 0.2 began finishes in its order of samples, with the losses that it had there."""

import contextlib

import pytest
import yaml
from helpers import in_process, jobs
from helpers.documents import opened_run
from helpers.in_process import StopAfter
from helpers.models import overfitting

from kftrain import config
from kftrain.core import storage
from kftrain.errors import Preempted
from kftrain.run.config import read_config
from kftrain.stages import resolve

WINDOWS = [
    *("data.shuffle_range_samples=3", "data.shuffle_window_ranges=2", "train.global_batch_size=4"),
    *("train.log_interval_steps=1", "train.steps=24", "checkpoint.interval_steps=5"),
]
"""Windows that hold a part of the twenty rows."""


def losses_of(paths):
    return [point["loss"] for point in storage.read_json(paths.history) if "loss" in point]


def trained(folder, monkeypatch, order, run_id):
    paths, resolved = jobs.prepare(folder, overfitting.TEXT, [*WINDOWS, f"data.order={order}"], run_id)
    in_process.train(paths, resolved, monkeypatch)
    return losses_of(paths)


@pytest.mark.parametrize("stop_after", [1, 7, 18])
def test_a_run_of_release_02_finishes_with_the_losses_of_its_order(tmp_path, monkeypatch, stop_after):
    old, new = (trained(tmp_path, monkeypatch, order, f"whole-{order}") for order in (2, 3))
    assert len(old) == len(new) == 24 and old[8:] != new[8:]
    paths, before = jobs.prepare(tmp_path, overfitting.TEXT, [*WINDOWS, "data.order=2"], "r")
    kept = before.to_dict()
    del kept["data"]["order"], kept["data"]["lanes"]  # as release 0.2 has kept it
    storage.publish(paths.config, yaml.safe_dump(kept))
    with contextlib.suppress(Preempted):
        in_process.train(paths, read_config(paths), monkeypatch, StopAfter(stop_after))
    given = config.parse(overfitting.TEXT, [f"run.storage_root={tmp_path}/store", *WINDOWS])
    opened_run(resolve.with_order(given, paths), "r")
    in_process.train(paths, read_config(paths), monkeypatch)
    assert losses_of(paths) == old
