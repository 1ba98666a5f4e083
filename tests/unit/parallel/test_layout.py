import pytest
from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.wrap import blocks_of, mesh_shape


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
