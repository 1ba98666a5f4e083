"""The switches of torch, as torch itself reports them, and what the configuration says of them."""

import os

import pytest
import torch
from helpers import in_process, jobs

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.parallel.settings import PrecisionConfig
from kftrain.train import session
from kftrain.train.numerics import WORKSPACE_ENV, set_numerics

SAFE = ("highest", False, False, False, False, False)


def report():
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv(WORKSPACE_ENV, raising=False)
    yield
    set_numerics(PrecisionConfig())
    os.environ.pop(WORKSPACE_ENV, None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, SAFE),
        ({"tf32": True}, ("high", True, True, False, False, False)),
        ({"cudnn_benchmark": True}, ("highest", False, False, True, False, False)),
        ({"deterministic": True}, ("highest", False, False, False, True, True)),
    ],
)
def test_torch_reports_what_is_configured_and_again_what_is_safe(settings, expected):
    set_numerics(PrecisionConfig(**settings))
    assert report() == expected
    assert os.environ.get(WORKSPACE_ENV) == (":4096:8" if "deterministic" in settings else None)
    set_numerics(PrecisionConfig())
    assert report() == SAFE


def test_a_workspace_that_somebody_has_chosen_stays(monkeypatch):
    monkeypatch.setenv(WORKSPACE_ENV, ":16:8")
    set_numerics(PrecisionConfig(deterministic=True))
    assert os.environ[WORKSPACE_ENV] == ":16:8"


class BuiltError(Exception):
    """Raised in place of building an engine."""


def test_a_training_sets_them_before_it_builds_anything(tmp_path, monkeypatch):
    seen = []

    def build(*_):
        seen.append(report())
        raise BuiltError

    monkeypatch.setattr(session, "build", build)
    paths, resolved = jobs.make_run(tmp_path, ["precision.deterministic=true", "precision.tf32=true"])
    with pytest.raises(BuiltError):
        in_process.train(paths, resolved, monkeypatch)
    assert seen == [("high", True, True, False, True, True)]


def test_what_chooses_anew_in_each_attempt_is_not_deterministic():
    with pytest.raises(ConfigError, match="cudnn_benchmark must be false"):
        config.parse("run: {name: r}\nprecision: {deterministic: true, cudnn_benchmark: true}")


def test_only_what_changes_numbers_is_in_the_identity_of_a_training():
    plain = config.parse("run: {name: r}").precision.identity()
    assert plain == {"compute": "fp32", "reduce": "fp32"}
    kept = PrecisionConfig(deterministic=True, cudnn_benchmark=False)
    assert kept.identity() == plain
    assert PrecisionConfig(tf32=True).identity() == {**plain, "tf32": True}
    scaled = PrecisionConfig(compute="fp16", loss_scale={"initial": 2.0})
    assert scaled.identity() == {"compute": "fp16", "reduce": "fp32", "loss_scale": {"initial": 2.0}}
