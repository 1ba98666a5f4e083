import pytest
import torch
from helpers import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from kftrain.parallel.gradients import UsedParameters


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])

    def forward(self, x, way):
        return self.ways[way](x)


def one_step(world, ways, is_old):
    if is_old:
        del FSDPModule.set_reduce_scatter_unused_params
    model = TwoWays()
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    used = UsedParameters(model, world.size)
    model(torch.ones(1, 2), ways[world.rank]).sum().backward()
    used.drop_unused(world.sum(used.take()))
    return [way.weight.grad is not None for way in model.ways]


@pytest.mark.parametrize("is_old", [False, True])
def test_a_parameter_that_no_process_has_used_has_no_gradient(is_old):
    assert ranks.on(2, one_step, (1, 1), is_old) == [[False, True], [False, True]]


def test_a_process_that_has_not_used_a_parameter_brings_zeros():
    assert ranks.on(2, one_step, (0, 1), False) == [[True, True], [True, True]]


def test_where_torch_cannot_bring_zeros_the_step_is_refused():
    for answer in ranks.on(2, one_step, (0, 1), True):
        assert answer.startswith("ConfigError: ") and "only some processes have used a parameter" in answer
        assert "torch 2.13 or newer" in answer
