"""The first validation of a training knows the task's metrics: a typo in the gate's metric ends it there."""

import contextlib
from types import SimpleNamespace

import pytest

from kftrain.config import load
from kftrain.errors import ConfigError
from kftrain.train import loop as module
from kftrain.train.loop import Loop


def looping(monkeypatch, metric, recorded):
    monkeypatch.setattr(module, "total_metrics", lambda metrics, statistics: {"mae": 1.0, "rmse": 2.0})
    loop = Loop.__new__(Loop)
    loop._config = load(None, [f"registry.metric={metric}"])
    loop.best = SimpleNamespace(is_wanted=False)
    loop._engine = SimpleNamespace(evaluate=lambda *arguments: {}, task=None)
    loop._validation, loop._world = None, SimpleNamespace(is_main=True)
    loop._liveness = SimpleNamespace(note_progress=None, mark_resting=contextlib.nullcontext)
    loop._recorder = SimpleNamespace(record_validation=lambda step, metrics: recorded.append((step, metrics)))
    return loop


def test_a_typo_in_the_metric_of_the_gate_is_found_at_the_first_validation(monkeypatch):
    with pytest.raises(ConfigError, match=r"registry\.metric=rmse"):
        looping(monkeypatch, "rmsee", [])._validate(200)


def test_a_metric_of_the_task_is_recorded(monkeypatch):
    recorded = []
    looping(monkeypatch, "mae", recorded)._validate(200)
    assert recorded == [(200, {"mae": 1.0, "rmse": 2.0})]


def test_at_the_last_step_the_training_is_committed_first_and_the_gate_says_it(monkeypatch):
    recorded = []
    looping(monkeypatch, "rmsee", recorded)._validate(400)
    assert [step for step, _ in recorded] == [400]
