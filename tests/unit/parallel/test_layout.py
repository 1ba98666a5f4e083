from datetime import timedelta

import pytest
import torch
from helpers import in_process, ranks
from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.world import World
from kftrain.parallel.wrap import Layout, distribute, mesh_shape, require_global_statistics


@pytest.mark.parametrize(
    ("shard", "replicate", "world_size", "shape"),
    [(-1, 1, 8, (1, 8)), (-1, 2, 8, (2, 4)), (4, 2, 8, (2, 4)), (1, 1, 1, (1, 1))],
)
def test_the_mesh_takes_all_processes(shard, replicate, world_size, shape):
    assert mesh_shape(shard, replicate, world_size) == shape


@pytest.mark.parametrize(("shard", "replicate", "world_size"), [(-1, 3, 8), (4, 1, 8), (-1, 9, 8)])
def test_a_mesh_that_does_not_multiply_is_refused(shard, replicate, world_size):
    with pytest.raises(ConfigError, match="number of processes, 8"):
        mesh_shape(shard, replicate, world_size)


@pytest.mark.parametrize(("strategy", "shape"), [("ddp", (8, 1)), ("fsdp", (2, 4))])
def test_ddp_is_the_mesh_that_shards_nothing(strategy, shape):
    assert Layout(strategy, -1, 2, True, "fp32", "fp32", False).mesh_shape(8) == shape


TWO = World(0, 2, torch.device("cpu"), None, None)


def test_batch_normalisation_over_several_processes_is_refused_by_name():
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1)))
    with pytest.raises(ConfigError, match=r"module 1\.0: batch normalisation is not .*BatchNorm1d.*GroupNorm"):
        require_global_statistics(model, TWO)
    require_global_statistics(model, World(0, 1, torch.device("cpu"), None, None))


def test_what_needs_no_synchronisation_is_not_refused():
    model = nn.Sequential(nn.GroupNorm(1, 1), nn.LayerNorm(1), nn.SyncBatchNorm(1), nn.InstanceNorm1d(1))
    require_global_statistics(model, TWO)


def test_batch_normalisation_that_is_kept_in_evaluation_mode_looks_at_no_batch():
    require_global_statistics(nn.Sequential(nn.BatchNorm1d(1).eval()), TWO)
    with pytest.raises(ConfigError):
        require_global_statistics(nn.Sequential(nn.BatchNorm1d(1, track_running_stats=False).eval()), TWO)


def test_recomputing_the_blocks_of_a_model_that_has_none_is_refused(monkeypatch):
    layout = Layout("fsdp", -1, 1, True, "fp32", "fp32", True)
    with in_process.world(monkeypatch) as world, pytest.raises(ConfigError, match="no blocks that could be recomputed"):
        distribute(nn.Linear(1, 1), layout, world, [])


def timeouts_of_groups(world):
    """Seconds that each group of a hybrid mesh waits, by the name of its axis."""
    model = nn.Linear(4, 4)
    distribute(model, Layout("fsdp", 2, 2, True, "fp32", "fp32", False), world, [])
    mesh = model.weight.device_mesh
    return {name: mesh.get_group(name)._get_backend(world.device).options._timeout for name in mesh.mesh_dim_names}


def test_the_groups_of_hybrid_sharding_wait_as_long_as_was_asked_for():
    for found in ranks.on(4, timeouts_of_groups):
        assert found == {name: timedelta(seconds=ranks.JOIN_SECONDS / 2) for name in ("replicate", "shard")}
