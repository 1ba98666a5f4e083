"""What an export costs: as many passes as asked for, over rows of the data, and nothing where it cannot be told."""

import numpy as np
import pytest
import torch

from kftrain.evaluate import performance
from kftrain.evaluate.performance import measure_performance, measure_spread
from kftrain.tasks.classification import Classification


class Rows:
    """Forty rows of three numbers."""

    num_samples = 40

    def __init__(self):
        self.read = []

    def read_range(self, start, stop):
        self.read.append((start, stop))
        numbers = np.arange(start, stop)
        return {"x": np.ones((stop - start, 3), np.float32), "label": numbers % 2}, numbers

    def place_of(self, number):
        return str(number)


class Numbers(Classification):
    def schema(self):
        raise NotImplementedError

    def batch(self, arrays):
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def inputs(self, batch):
        return (batch["x"],)


def measured(rows, num_passes=5, batch_size=16):
    model = torch.nn.Linear(3, 2)
    task = Numbers(num_classes=2)
    return measure_performance(model, task, rows, batch_size, num_passes, torch.device("cpu"), "digest", 123)


def test_passes_go_over_rows_that_are_spread_over_the_data_after_one_that_does_not_count():
    rows = Rows()
    found = measured(rows)
    assert rows.read[:6] == [(0, 1), (0, 1), (8, 9), (16, 17), (24, 25), (32, 33)]
    assert rows.read[6:] == [(0, 16), (0, 16), (4, 20), (9, 25), (14, 30), (19, 35)]
    assert (found.num_passes, found.batch_size, found.export_bytes, found.device) == (5, 16, 123, "CPU")
    for each in (found.latency_seconds, found.batch_latency_seconds):
        assert 0 < each.low <= each.median <= each.high


def test_a_split_smaller_than_a_batch_is_one():
    assert measured(Rows(), batch_size=100).batch_size == 40


def test_a_slow_model_is_not_asked_many_times(monkeypatch):
    monkeypatch.setattr(performance, "MAX_SECONDS", 0.0)
    assert measured(Rows(), num_passes=30).num_passes == performance.MIN_PASSES


def test_memory_is_what_the_process_had_at_its_most_and_not_what_it_had_before(monkeypatch):
    found = measured(Rows()).memory_bytes
    if found is None:
        pytest.skip("no /proc here")
    assert 10e6 < found.low <= found.median <= found.high
    monkeypatch.setattr(performance, "_peak_bytes", lambda device: None)
    assert measured(Rows()).memory_bytes is None


def test_the_spread_is_the_median_and_the_outer_percentiles():
    found = measure_spread([float(number) for number in range(101)])
    assert (found.low, found.median, found.high) == (5.0, 50.0, 95.0)
