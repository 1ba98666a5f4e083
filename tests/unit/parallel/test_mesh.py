"""The mesh: who reads which samples, who shares what; and the groups of that."""

import itertools
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import ranks
from helpers.pool import COLLECTIVE_SECONDS
from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.activations import CheckpointActivations
from kftrain.parallel.fully_shard import FullyShard
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.shape import AXES, DATA_AXES, LOSS_AXES, NORM_AXES, Shape
from kftrain.parallel.strategies import Sharding
from kftrain.parallel.transforms import distribute, list_transforms

SHAPES = [
    Shape(*sizes)
    for sizes in [(1,) * 6, (2, 3, 1, 1, 1, 1), (2, 1, 3, 1, 2, 1), (1, 2, 2, 2, 1, 2), (2, 2, 2, 2, 2, 2)]
]


@pytest.mark.parametrize(
    ("shard", "replicate", "num_processes", "shape"),
    [(-1, 1, 8, (1, 8)), (-1, 2, 8, (2, 4)), (4, 2, 8, (2, 4)), (1, 1, 1, (1, 1))],
)
def test_the_mesh_takes_all_processes(shard, replicate, num_processes, shape):
    layout = ParallelConfig(shard=shard, replicate=replicate).shape(num_processes)
    assert (layout.replicate, layout.shard) == shape and layout.size == num_processes == layout.num_data_ranks


@pytest.mark.parametrize(("shard", "replicate", "num_processes"), [(-1, 3, 8), (4, 1, 8), (-1, 9, 8)])
def test_a_mesh_that_does_not_multiply_is_refused(shard, replicate, num_processes):
    with pytest.raises(ConfigError, match="number of processes, 8"):
        ParallelConfig(shard=shard, replicate=replicate).shape(num_processes)


@pytest.mark.parametrize(("strategy", "shape"), [("ddp", (8, 1)), ("fsdp", (2, 4))])
def test_ddp_is_the_mesh_that_shards_nothing(strategy, shape):
    layout = ParallelConfig(strategy=strategy, replicate=2).shape(8)
    assert (layout.replicate, layout.shard) == shape


def test_the_other_axes_take_their_processes_first():
    parallel = ParallelConfig.model_construct(replicate=2, tensor=2, pipeline=2, expert=2, context=2)
    assert parallel.shape(32) == Shape(2, 1, 2, 2, 2, 2) and parallel.shape(64).num_shards == 2 * 2 * 2
    with pytest.raises(ConfigError, match=r"replicate x parallel.shard x parallel.context.* number of processes, 24"):
        parallel.shape(24)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_process_has_a_place_of_its_own_and_a_group_shares_all_but_its_axes(shape):
    places = [shape.coordinates(rank) for rank in range(shape.size)]
    sizes = {axis: getattr(shape, axis) for axis in AXES}
    every = [dict(zip(sizes, places, strict=True)) for places in itertools.product(*map(range, sizes.values()))]
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


@pytest.mark.parametrize(
    ("axis", "samples_differ", "loss_terms_differ", "gradients_differ", "stride"),
    [
        ("replicate", True, True, False, 16),
        ("shard", True, True, True, 8),
        ("context", False, True, True, 2),
        ("tensor", False, False, True, 1),
        ("pipeline", False, False, True, 32),
        ("expert", True, True, True, 4),
    ],
)
def test_what_differs_along_an_axis_and_how_far_neighbours_are(
    axis, samples_differ, loss_terms_differ, gradients_differ, stride
):
    pair = Shape(**{axis: 2})
    assert (pair.num_data_ranks, pair.data_rank(1)) == ((2, 1) if samples_differ else (1, 0))
    assert pair.counts_loss(0) and pair.counts_loss(1) == loss_terms_differ
    assert (axis in NORM_AXES) == gradients_differ
    assert Shape(*[2] * 6).groups([axis])[0] == [0, stride]


def test_a_strategy_is_an_ordered_list_of_transforms():
    settings = ParallelConfig(reshard_after_forward=False), PrecisionConfig(compute="bf16")
    within = [CheckpointActivations("blocks", ("layer",))]
    alone = [type(transform).__name__ for transform in list_transforms(*settings, within, Shape())]
    assert alone == ["CheckpointActivations", "ToDevice", "Formats"], "no wrapper: one process has nothing to share"
    assert list_transforms(*settings, within, Shape(shard=2)) == [
        *within,
        FullyShard("bf16", "fp32", Sharding(False, True, "step")),
    ]


def timeouts_of_groups(world):
    """Seconds that each group of a hybrid mesh waits, by the name of its axis; and the sizes of the mesh's groups."""
    model, settings = nn.Linear(4, 4), ParallelConfig(shard=2, replicate=2)
    mesh = Mesh(settings.shape(world.size), world)
    distribute(model, list_transforms(settings, PrecisionConfig(), [], mesh.shape), mesh, [])
    own = model.weight.device_mesh
    timeouts = {name: own.get_group(name)._get_backend(world.device).options._timeout for name in own.mesh_dim_names}
    return timeouts, (mesh.data_rank, mesh.num_data_ranks, mesh.norm_group().size(), mesh.counts_loss)


def test_the_groups_of_hybrid_sharding_wait_as_long_as_was_asked_for():
    for rank, (timeouts, place) in enumerate(ranks.on(4, timeouts_of_groups)):
        assert timeouts == {name: timedelta(seconds=COLLECTIVE_SECONDS) for name in ("replicate", "shard")}
        assert place == (rank, 4, 2, True)


def facts_of(world, shape):
    """What a mesh says on one process, and the ranks of its groups."""
    mesh = Mesh(shape, world)
    norm, groups = mesh.norm_group(), {axis: mesh.group([axis]) for axis in AXES if getattr(shape, axis) > 1}
    return {
        "data": (mesh.data_rank, mesh.num_data_ranks),
        "loss": mesh.sum_of_losses([10.0**world.rank, 1.0]),
        "norm": norm and dist.get_process_group_ranks(norm),
        "groups": {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()},
        "once": all(mesh.group([axis, "context"]) is group for axis, group in groups.items()),
        "world": mesh.group(AXES) is dist.group.WORLD,
    }


@pytest.mark.parametrize(
    ("shape", "data", "loss", "norm", "groups"),
    [
        (Shape(replicate=4), [0, 1, 2, 3], [1111.0, 4.0], None, {"replicate": [[0, 1, 2, 3]]}),
        (
            Shape(replicate=2, tensor=2),
            *([0, 0, 1, 1], [101.0, 2.0], [[0, 1], [2, 3]]),
            {"replicate": [[0, 2], [1, 3]], "tensor": [[0, 1], [2, 3]]},
        ),
    ],
    ids=["copies", "copies of tensors"],
)
def test_each_process_shares_with_those_that_the_shape_names(shape, data, loss, norm, groups):
    """A group of all is the world as torch knows it already; none is made twice."""
    for rank, facts in enumerate(ranks.on(4, facts_of, shape)):
        assert facts["data"] == (data[rank], shape.num_data_ranks) and facts["loss"] == loss
        assert facts["norm"] == (norm and norm[rank // 2])
        assert facts["groups"] == {axis: next(g for g in parts if rank in g) for axis, parts in groups.items()}
        assert facts["once"] and facts["world"]


def device_mesh_of(world):
    """Torch's mesh of two copies of two shards, and those of layouts with axes that it has folded or left out."""
    device_mesh = Mesh(Shape(replicate=2, shard=2), world).device_mesh()
    folded = Mesh(Shape(shard=2, context=2), world).device_mesh()
    assert folded.mesh.tolist() == [[0, 1, 2, 3]] and dist.get_process_group_ranks(folded.get_group("shard")) == [
        *range(4)
    ]
    stage = Mesh(Shape(pipeline=2, expert=2), world).device_mesh()
    assert stage.mesh.tolist() == [[[0, 1]], [[2, 3]]][world.rank // 2]
    with pytest.raises(AssertionError):
        Mesh(Shape(shard=2), world)
    names = device_mesh.mesh_dim_names
    return (
        names,
        device_mesh.mesh.tolist(),
        [dist.get_process_group_ranks(device_mesh.get_group(name)) for name in names],
    )


def test_torchs_own_mesh_has_the_same_groups():
    for rank, (names, table, groups) in enumerate(ranks.on(4, device_mesh_of)):
        assert names == ("replicate", "shard") and table == [[0, 1], [2, 3]]
        assert groups == [[[0, 2], [1, 3]][rank % 2], [[0, 1], [2, 3]][rank // 2]]


def spread_mesh_of(world):
    """Torch's mesh of two copies of two parts of each matrix."""
    mesh = Mesh(Shape(replicate=2, tensor=2), world)
    device_mesh = mesh.device_mesh()
    names = device_mesh.mesh_dim_names
    timeouts = {device_mesh.get_group(name)._get_backend(world.device).options._timeout for name in names}
    assert mesh.device_mesh() is device_mesh and timeouts == {timedelta(seconds=COLLECTIVE_SECONDS)}
    return names, device_mesh.mesh.tolist(), dist.get_process_group_ranks(device_mesh.get_group("tensor"))


def test_those_that_split_a_matrix_are_neighbours_in_torchs_mesh():
    for rank, answer in enumerate(ranks.on(4, spread_mesh_of)):
        assert answer == (("replicate", "shard", "tensor"), [[[0, 1]], [[2, 3]]], [[0, 1], [2, 3]][rank // 2])


@pytest.mark.parametrize(
    ("strategy", "replicate", "shard", "shape"),
    [("fsdp", 1, -1, (1, 4, 2)), ("fsdp", 2, -1, (2, 2, 2)), ("fsdp", 2, 2, (2, 2, 2)), ("ddp", 1, -1, (4, 1, 2))],
)
def test_the_axis_tensor_takes_its_part_of_the_processes(strategy, replicate, shard, shape):
    settings = ParallelConfig(strategy=strategy, replicate=replicate, shard=shard, tensor=2)
    layout = settings.shape(8)
    assert (layout.replicate, layout.shard, layout.tensor) == shape
    with pytest.raises(ConfigError, match=r"parallel.replicate x parallel.shard x parallel.tensor must be .* 9"):
        settings.shape(9)


def test_of_copies_each_has_samples_of_its_own_and_none_shares_its_gradients():
    for rank, answer in enumerate(ranks.on(2, copies)):
        assert answer == ((rank, 2), True, [11.0])


def copies(world):
    """What evaluation knows of its mesh."""
    mesh = Mesh.of_copies(world)
    return (mesh.data_rank, mesh.num_data_ranks), mesh.norm_group() is None, mesh.sum_of_losses([10.0**world.rank])
