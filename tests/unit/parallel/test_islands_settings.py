"""Islands in the configuration: what is refused beside them, what they are in the identity, and who stands where."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.evaluate.layout import layouts
from kftrain.train.islands import cut_fragments, list_due_fragments

ISLANDS = "parallel.islands=2"
FIT = ("parallel.strategy=ddp", "precision.compute=fp32")
QUORUM = (ISLANDS, "server.num_servers=1", "train.outer.quorum=1", "train.outer.steps=5")
APART = (*QUORUM, "checkpoint.interval_steps=20", "evaluate.interval_steps=0")


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
        (["server.num_servers=2", "server.copies=2"], "server.copies"),
        (["server.num_servers=1", "server.encoding=int8"], "server.encoding"),
        (["server.num_servers=1", "server.tables=[{name: ids, dim: 4}]", *FIT], "server.tables"),
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
    with pytest.raises(ConfigError, match="num_fragments must divide steps, 10"):
        config.parse("", [ISLANDS, "train.outer.steps=10", "train.outer.num_fragments=4"])
    with pytest.raises(ConfigError, match="num_fragments must be 1 with servers"):
        config.parse("", [ISLANDS, "server.num_servers=1", "train.outer.num_fragments=2"])


def test_each_fragment_has_its_turn_among_the_steps_and_all_after_the_last_one():
    outer = ["train.outer.steps=6", "train.outer.num_fragments=3", "train.steps=17"]
    train = config.parse("", [ISLANDS, *outer]).train
    turns = {steps: list_due_fragments(train, steps) for steps in range(1, 18)}
    due = {2: [0], 4: [1], 6: [2], 8: [0], 10: [1], 12: [2], 14: [0], 16: [1], 17: [0, 1, 2]}
    assert {steps: fragments for steps, fragments in turns.items() if fragments} == due


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=30), st.integers(1, 9))
def test_fragments_are_whole_parameters_that_cover_the_vector(sizes, num_fragments):
    wholes, own = [whole for whole, _ in sizes], [min(whole, part) for whole, part in sizes]
    fragments = cut_fragments(wholes, own, num_fragments)
    assert len(fragments) == num_fragments
    ends = [0, *itertools.accumulate(own)]
    assert [one.start for one in fragments] == [0, *(one.stop for one in fragments[:-1])]
    assert fragments[-1].stop == ends[-1] and all(one.stop in ends for one in fragments)
    whole = cut_fragments(wholes, wholes, num_fragments)
    counts = [one.stop for one in cut_fragments(wholes, [1] * len(wholes), num_fragments)]
    assert [one.stop for one in whole] == [sum(wholes[:count]) for count in counts], "another layout cuts elsewhere"
    assert all(one.stop - one.start <= sum(wholes) / num_fragments + max(wholes) for one in whole if wholes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ISLANDS, "train.outer.grace_seconds=3"], "are of a quorum"),
        ([ISLANDS, "train.outer.max_rounds_ahead=3"], "are of a quorum"),
        ([*APART, "train.outer.quorum=3"], r"quorum must be at most parallel\.islands, 2"),
        ([*APART, "server.num_servers=0"], r"quorum is kept by servers"),
        ([*APART, "train.log_interval_steps=7"], r"log_interval_steps must be a multiple of train\.outer\.steps, 5"),
        ([*APART, "checkpoint.interval_steps=9"], r"checkpoint\.interval_steps must be a multiple"),
        ([*APART, "evaluate.interval_steps=9"], r"evaluate\.interval_steps must be a multiple"),
        ([*APART, "checkpoint.keep_every=9"], r"checkpoint\.keep_every must be a multiple"),
        (["server.num_servers=1"], r"server\.num_servers must be 0 where there are neither"),
    ],
)
def test_a_quorum_that_cannot_come_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config.parse("", overrides)


def test_islands_meet_where_the_run_does_something_together():
    resolved = config.parse("", [*APART, "train.log_interval_steps=15", "train.steps=47"])
    assert [steps for steps in range(1, 48) if resolved.is_meeting(steps)] == [15, 20, 30, 40, 45, 47]


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
