"""Sums of gradients by exchange, against torch's own reduce-scatter and against numpy."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kftrain.parallel.fully_shard import ExchangedSums, FullyShard, sum_rows
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.shape import Shape
from kftrain.parallel.strategies import resolve_sharding
from kftrain.parallel.transforms import distribute


def brought_by(rank, size, number):
    """What a process brings to the exchange of that number: lengths shrink and grow, so that a buffer is used again."""
    rows = [5, 1, 7][number]
    return np.random.default_rng([rank, number]).normal(size=size * rows).astype(np.float32)


def reduced(world, dtype):
    reduce_scatter, sums = ExchangedSums(), []
    for number in range(3):
        given = torch.from_numpy(brought_by(world.rank, world.size, number)).to(dtype)
        output = reduce_scatter.allocate((given.numel() // world.size,), dtype=dtype, device=world.device)
        reduce_scatter(output, given, dist.group.WORLD, dist.ReduceOp.SUM)
        theirs = torch.empty_like(output)
        dist.reduce_scatter_single(theirs, given.clone(), dist.ReduceOp.SUM)
        torch.testing.assert_close(output, theirs)
        sums.append(output.float().numpy())
    return sums


@pytest.mark.parametrize("size", [2, 3])
def test_parts_are_added_in_the_order_of_the_ranks(size):
    answers = ranks.on(size, reduced, torch.float32)
    for number in range(3):
        total = brought_by(0, size, number)
        for rank in range(1, size):
            total = total + brought_by(rank, size, number)
        assert np.array_equal(np.concatenate([answer[number] for answer in answers]), total)


def test_sums_of_bf16_are_rounded_once():
    answers = ranks.on(3, reduced, torch.bfloat16)
    brought = [torch.from_numpy(brought_by(rank, 3, 0)).bfloat16().double() for rank in range(3)]
    expected = torch.stack(brought).sum(dim=0).float().bfloat16().float().numpy()
    assert np.array_equal(np.concatenate([answer[0] for answer in answers]), expected)
    assert sum_rows(torch.ones(2, 3)).tolist() == [2, 2, 2]


BLOCKS = ("0", "1")


def gradients(world, ours):
    """Of parameters whose rows no number of processes divides, and how often they were exchanged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 1))
    calls, exchange = [], ExchangedSums.__call__
    ExchangedSums.__call__ = lambda *arguments, **keywords: calls.append(0) or exchange(*arguments, **keywords)
    if ours:
        mesh = Mesh(Shape(shard=world.size), world)
        distribute(model, [FullyShard("fp32", "fp32", resolve_sharding("fsdp", "step"))], mesh, BLOCKS)
    else:
        mesh = init_device_mesh("cpu", (world.size,))
        for module in (*map(model.get_submodule, BLOCKS), model):
            fully_shard(module, mesh=mesh)
    model(torch.full((2, 3), 1.0 + world.rank)).square().sum().backward()
    return len(calls), [parameter.grad.full_tensor().tolist() for parameter in model.parameters()]


def test_each_unit_of_a_sharded_model_has_the_gradients_of_torchs_own_reduction():
    answers, theirs = ranks.on(3, gradients, True), ranks.on(3, gradients, False)
    assert {calls for calls, _ in answers} == {3} and {calls for calls, _ in theirs} == {0}
    for (_, one), (_, other) in zip(answers, theirs, strict=True):
        for mine, its in zip(one, other, strict=True):
            torch.testing.assert_close(torch.tensor(mine), 3 * torch.tensor(its))  # by itself torch's is the mean
