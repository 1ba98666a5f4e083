"""The mesh: who reads which samples, who shares what; and the groups of that."""

import itertools
from datetime import timedelta

import pytest
from helpers import ranks
from torch import nn

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.shape import AXES, DATA_AXES, LOSS_AXES, NORM_AXES, Shape
from kftrain.parallel.transforms import FullyShard, Recompute, distribute, strategy_of

SHAPES = [
    Shape(*sizes)
    for sizes in [(1,) * 6, (2, 3, 1, 1, 1, 1), (2, 1, 3, 1, 2, 1), (1, 2, 2, 2, 1, 2), (2, 2, 2, 2, 2, 2)]
]


@pytest.mark.parametrize(
    ("shard", "replicate", "num_processes", "shape"),
    [(-1, 1, 8, (1, 8)), (-1, 2, 8, (2, 4)), (4, 2, 8, (2, 4)), (1, 1, 1, (1, 1))],
)
def test_the_mesh_takes_all_processes(shard, replicate, num_processes, shape):
    found = ParallelConfig(shard=shard, replicate=replicate).shape(num_processes)
    assert (found.replicate, found.shard) == shape and found.size == num_processes == found.num_data_ranks


@pytest.mark.parametrize(("shard", "replicate", "num_processes"), [(-1, 3, 8), (4, 1, 8), (-1, 9, 8)])
def test_a_mesh_that_does_not_multiply_is_refused(shard, replicate, num_processes):
    with pytest.raises(ConfigError, match="number of processes, 8"):
        ParallelConfig(shard=shard, replicate=replicate).shape(num_processes)


@pytest.mark.parametrize(("strategy", "shape"), [("ddp", (8, 1)), ("fsdp", (2, 4))])
def test_ddp_is_the_mesh_that_shards_nothing(strategy, shape):
    found = ParallelConfig(strategy=strategy, replicate=2).shape(8)
    assert (found.replicate, found.shard) == shape


@pytest.mark.parametrize("axis", ["context", "tensor", "pipeline", "expert"])
def test_an_axis_that_nothing_is_spread_along_yet_is_refused_with_the_reason(axis):
    with pytest.raises(ConfigError, match=rf"parallel: {axis} must be 1: .* yet") as raised:
        config.parse("{}", [f"parallel.{axis}=2"])
    assert raised.value.exit_code == 10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_process_has_a_place_of_its_own_and_a_group_shares_all_but_its_axes(shape):
    places = [shape.coordinates(rank) for rank in range(shape.size)]
    sizes = {axis: getattr(shape, axis) for axis in AXES}
    every = [dict(zip(sizes, each, strict=True)) for each in itertools.product(*map(range, sizes.values()))]
    assert all(place in places for place in every) and len(places) == len(every)
    for axes in (DATA_AXES, LOSS_AXES, NORM_AXES, ["shard"]):
        groups = shape.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(range(shape.size))
        for group in groups:
            assert len({tuple(v for a, v in places[rank].items() if a not in axes) for rank in group}) == 1
            assert len(group) == len({tuple(v for a, v in places[rank].items() if a in axes) for rank in group})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_data_rank_is_one_for_all_that_read_the_same_samples(shape):
    for group in shape.groups(DATA_AXES):
        assert sorted(shape.data_rank(rank) for rank in group) == list(range(shape.num_data_ranks))
    counted = [rank for rank in range(shape.size) if shape.counts_loss(rank)]
    assert counted in shape.groups(LOSS_AXES), "each term is counted once"
    if (shape.replicate, shape.shard) == (shape.size, 1):
        assert [shape.data_rank(rank) for rank in range(shape.size)] == list(range(shape.size))


def test_neighbours_are_those_that_shard_as_they_were_before_there_were_more_axes():
    shape = Shape(replicate=2, shard=3)
    assert shape.groups(["shard"]) == [[0, 1, 2], [3, 4, 5]] and shape.groups(["replicate"]) == [[0, 3], [1, 4], [2, 5]]
    assert [shape.data_rank(rank) for rank in range(6)] == [0, 1, 2, 3, 4, 5]


def test_a_strategy_is_an_ordered_list_of_transforms():
    settings = ParallelConfig(reshard_after_forward=False), PrecisionConfig(compute="bf16")
    alone = [type(each).__name__ for each in strategy_of(*settings, True, Shape())]
    assert alone == ["Recompute", "ToDevice", "Formats"], "no wrapper: one process has nothing to share"
    assert strategy_of(*settings, True, Shape(shard=2)) == [Recompute(), FullyShard("bf16", "fp32", False)]


def timeouts_of_groups(world):
    """Seconds that each group of a hybrid mesh waits, by the name of its axis; and the sizes of the mesh's groups."""
    model, settings = nn.Linear(4, 4), ParallelConfig(shard=2, replicate=2)
    mesh = Mesh(settings.shape(world.size), world)
    distribute(model, strategy_of(settings, PrecisionConfig(), False, mesh.shape), mesh, [])
    own = model.weight.device_mesh
    timeouts = {name: own.get_group(name)._get_backend(world.device).options._timeout for name in own.mesh_dim_names}
    return timeouts, (mesh.data_rank, mesh.num_data_ranks, mesh.norm_group().size(), mesh.counts_loss)


def test_the_groups_of_hybrid_sharding_wait_as_long_as_was_asked_for():
    for rank, (found, place) in enumerate(ranks.on(4, timeouts_of_groups)):
        assert found == {name: timedelta(seconds=ranks.JOIN_SECONDS / 2) for name in ("replicate", "shard")}
        assert place == (rank, 4, 2, True)
