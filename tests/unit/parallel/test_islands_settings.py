"""Islands in the configuration: what is refused beside them, what they are in the identity, and who stands where."""

import itertools

import pytest

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.evaluate.layout import layouts

ISLANDS = "parallel.islands=2"


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["parallel.tensor=2"], "parallel.tensor"),
        (["parallel.pipeline=2"], "parallel.pipeline"),
        (["parallel.context=2"], "parallel.context"),
        (["parallel.strategy=auto"], "parallel.strategy"),
        (["parallel.layout=auto"], "parallel.layout"),
        (["parallel.offload=true"], "parallel.offload"),
        (["parallel.strategy=ddp", "parallel.hierarchical=true"], "parallel.hierarchical"),
        (["parallel.compression.kind=int8"], "parallel.compression.kind"),
        (["precision.compute=fp16"], "precision.compute"),
        (["precision.compute=bf16", "precision.master=bf16"], "precision.master"),
        (["train.average_decay=0.9"], "train.average_decay"),
        (["train.noise_scale=true"], "train.noise_scale"),
        (["train.micro_batch_size=auto"], "train.micro_batch_size"),
        (["train.batch_warmup=[{steps: 1, batch_size: 2}]"], "train.batch_warmup"),
    ],
)
def test_what_no_test_has_shown_to_go_with_islands_is_refused(overrides, where):
    with pytest.raises(ConfigError, match=rf"{where} must not be .* with parallel\.islands"):
        config.parse("", [ISLANDS, *overrides])


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ConfigError, match=r"train\.outer is of islands"):
        config.parse("", ["train.outer.steps=10"])
    with pytest.raises(ConfigError, match="are of optimizer nesterov"):
        config.parse("", [ISLANDS, "train.outer.optimizer=average", "train.outer.momentum=0.5"])


def test_islands_and_their_exchange_are_in_the_training_identity():
    def identity_of(*overrides):
        return config.parse("", list(overrides)).training_identity("d")

    trainings = [[], [ISLANDS], [ISLANDS, "train.outer.steps=9"], [ISLANDS, "train.outer.encoding=int8"]]
    identities = [identity_of(*overrides) for overrides in trainings]
    assert all(first != second for first, second in itertools.pairwise(identities))
    assert "islands" not in str(identities[0]) and "outer" not in str(identities[0])


def test_islands_are_the_outermost_axis_and_read_parts_that_follow_each_other():
    shape = config.parse("", [ISLANDS, "parallel.shard=2", "parallel.replicate=2"]).parallel.shape(8)
    assert shape.groups(["islands"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [shape.data_rank(rank) for rank in range(8)] == list(range(8))
    assert (shape.island_size, shape.num_data_ranks) == (4, 8)


def test_unequal_islands_are_refused():
    parallel = config.parse("", [ISLANDS]).parallel
    with pytest.raises(ConfigError, match="no 4 equal parts"):
        parallel.require_equal_islands(6, 4)
    parallel.require_equal_islands(8, 4)


def test_an_evaluation_has_no_islands():
    resolved = config.parse("", [ISLANDS, "parallel.shard=2", "evaluate.layout=training"])
    first, *_ = layouts(resolved, 10**12, 4)
    assert (first.islands, first.replicate, first.shard) == (1, 2, 2)
    assert first.shape(4).size == 4
