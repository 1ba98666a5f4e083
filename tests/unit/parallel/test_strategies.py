"""Which strategy `auto` takes, and what an older configuration means."""

import pytest
from helpers import ranks
from torch import nn

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.parallel import transforms
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.strategies import Sharding, choose_strategy, resolve_sharding

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory_gib", "processes", "accumulates", "half", "strategy"),
    [
        (40, 8, False, False, "zero1"),  # 4 GiB of parameters: 16/8 sharded and 4 gathered are 6 of 20
        (12, 8, False, False, "zero1"),  # 6 of 6
        (11, 8, False, False, "fsdp"),
        (12, 8, True, False, "zero2"),  # 4 more for the gradients of all micro batches
        (20, 8, True, False, "zero1"),  # 10 of 10
        (8, 8, False, True, "zero1"),  # what is gathered is half as large: 4 of 4
        (40, 1, False, False, "zero1"),
        (39, 1, False, False, "fsdp"),
    ],
)
def test_auto_takes_the_first_whose_state_fits_into_half_of_the_memory(
    memory_gib, processes, accumulates, half, strategy
):
    choice = choose_strategy(4 * GIB, memory_gib * GIB, processes, accumulates, half)
    assert choice.strategy == strategy
    assert f"{memory_gib} GiB" in choice.reason


def test_what_does_not_reshard_after_forward_is_zero1_as_ever():
    old = config.parse("parallel: {strategy: fsdp, reshard_after_forward: false}", []).parallel
    assert old.stage == "zero1" and config.parse("{}", []).parallel.stage == "fsdp"
    assert config.parse("parallel: {strategy: ddp, reshard_after_forward: false}", []).parallel.stage == "ddp"


def test_what_each_strategy_keeps_whole():
    assert resolve_sharding("zero1", "step") == Sharding(False, True, "step")
    assert resolve_sharding("zero2", "step") == Sharding(False, True, "micro_batch")
    assert [resolve_sharding("fsdp", exchange) for exchange in ("step", "micro_batch")] == [
        Sharding(True, False, "step"),
        Sharding(True, False, "micro_batch"),
    ]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "auto"])
def test_a_strategy_that_sums_first_cannot_exchange_each_micro_batch(strategy):
    with pytest.raises(ConfigError, match="exchange must be step"):
        config.parse(f"parallel: {{strategy: {strategy}, exchange: micro_batch}}", [])


def settle(world, text):
    mesh_settings = config.parse(text, []).parallel
    resolved, line = transforms.resolve_strategy(
        mesh_settings, nn.Linear(4, 4), Mesh(mesh_settings.shape(2), world), 1, False
    )
    return resolved.strategy, line


def test_the_log_says_what_auto_took_and_why():
    for strategy, line in ranks.on(2, settle, "parallel: {strategy: auto}"):
        assert strategy == "zero1" and line.startswith("parallel.strategy: auto takes zero1: it needs 2.24e-07 GiB; of")
    assert ranks.on(2, settle, "parallel: {strategy: zero2}") == [("zero2", "")] * 2


def test_offload_is_refused_without_an_accelerator():
    for answer in ranks.on(2, settle, "parallel: {offload: true}"):
        assert answer.startswith("ConfigError: ") and "parallel.offload" in answer and "no accelerator" in answer
        assert "\n" not in answer
    with pytest.raises(ConfigError, match="offload must be false"):
        config.parse("parallel: {strategy: ddp, offload: true}", [])
