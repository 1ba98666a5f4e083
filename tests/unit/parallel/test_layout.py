import pytest
import torch
from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.world import World
from kftrain.parallel.wrap import Layout, _refuse_local_statistics, blocks_of, distribute, mesh_shape


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


def test_blocks_are_what_the_model_says_or_its_longest_list():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.short = nn.ModuleList([nn.Linear(1, 1)])
            self.long = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])

    class Named(Plain):
        def blocks(self):
            return list(self.short)

    assert len(blocks_of(Plain())) == 3
    assert len(blocks_of(Named())) == 1
    assert blocks_of(nn.Linear(1, 1)) == []


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_batch_normalisation_over_several_processes_is_refused_by_name(strategy):
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1)))
    layout = Layout(strategy, -1, 1, True, "fp32", "fp32", False)
    with pytest.raises(ConfigError, match=r"module 1\.0: batch normalisation is not .*BatchNorm1d.*GroupNorm"):
        distribute(model, layout, World(0, 2, torch.device("cpu"), None, None))


def test_what_needs_no_synchronisation_is_not_refused():
    model = nn.Sequential(nn.GroupNorm(1, 1), nn.LayerNorm(1), nn.SyncBatchNorm(1), nn.InstanceNorm1d(1))
    _refuse_local_statistics(model)
