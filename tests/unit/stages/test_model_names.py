"""What a configuration names is looked at before the first step: the registered model, its code, and its length."""

import pytest
from helpers.documents import digits_config

from kftrain.config import Config, parse
from kftrain.errors import ConfigError
from kftrain.models.settings import ModelConfig
from kftrain.registry.settings import RegistryConfig
from kftrain.stages import preflight
from kftrain.stages.shard import shard


@pytest.mark.parametrize("name", ["bob's model", "a/b", "a:b", "a" * 300])
def test_a_name_that_cannot_be_registered_is_refused_before_the_first_step(name):
    with pytest.raises(ConfigError, match=r"registry\.model_name: no name of a registered model"):
        preflight.check_run(Config(registry=RegistryConfig(model_name=name)))


def test_a_name_with_spaces_dots_and_other_letters_is_one():
    preflight.check_model_name("Bär v2.1 (night)")


def test_a_model_that_is_not_there_is_named_before_anything_is_sharded():
    with pytest.raises(ConfigError, match=r"model\.kind: no module named nobodys"):
        preflight.check_run(Config(model=ModelConfig(kind="nobodys.model:Net")))


@pytest.mark.parametrize(
    ("settings", "is_odd"),
    [
        (["train.steps=9", "optimizer.warmup_steps=10"], True),
        (["train.steps=10", "optimizer.warmup_steps=10"], False),
        (["train.steps=9", "optimizer.warmup_steps=10", "optimizer.schedule=constant"], False),
        (["train.steps=9", "optimizer.warmup_steps=10", "train.command=[train.py]"], False),
    ],
)
def test_a_warmup_longer_than_the_training_is_said_with_both_numbers(settings, is_odd):
    lines = preflight.describe_oddities(parse("", settings))
    assert ["optimizer.warmup_steps (10) is more than train.steps (9)" in line for line in lines] == [True] * is_odd


def test_the_first_stage_says_it(tmp_path):
    lines = []
    shard(digits_config(tmp_path, "train.steps=3", "optimizer.warmup_steps=10"), "r-1", progress=lines.append)
    assert any("warning: optimizer.warmup_steps (10)" in line for line in lines)
