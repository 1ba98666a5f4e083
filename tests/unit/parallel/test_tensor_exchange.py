"""What processes that split a model exchange, there and back, against the whole tensor on each process."""

import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from torch.utils._python_dispatch import TorchDispatchMode

from kftrain.errors import ConfigError
from kftrain.parallel.tensor_exchange import Peers, Regrouped, Stream

ROWS, PLACES, DIM = 2, 6, 3


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_stream(world, in_parts):
    """Differences from what all processes' tensors say, of each exchange and its gradient."""
    stream = Stream(Peers(dist.group.WORLD, world.size, world.rank), in_parts)
    part = slice(world.rank * PLACES // world.size, (world.rank + 1) * PLACES // world.size)
    mine = (lambda whole: whole[:, part]) if in_parts else (lambda whole: whole)
    wholes = [numbers(ROWS, PLACES, DIM, seed=rank) for rank in range(world.size)]
    same, own, total = wholes[0], wholes[world.rank], sum(wholes)
    differences = {}
    for name, given, expected, gradient, back in (
        ("enter", mine(same), same, own, mine(total)),
        ("leave", own, mine(total), mine(same), same),
        ("split", same, mine(same), mine(same), same),
        ("join", mine(same), same, same, mine(same)),
    ):
        tensor = given.clone().requires_grad_()
        result = getattr(stream, name)(tensor)
        result.backward(gradient)
        differences[name] = float((result.detach() - expected).abs().max()), float((tensor.grad - back).abs().max())
    return differences


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_an_exchange_and_its_gradient_are_those_of_the_whole(size, in_parts):
    for differences in ranks.on(size, of_stream, in_parts):
        assert max(value for pair in differences.values() for value in pair) < 1e-5, differences


class NothingIsSorted(TorchDispatchMode):
    """Where rows go to is known after the first call."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in str(func) for name in ("sort", "bincount", "arange")), func
        return func(*args, **(kwargs or {}))


def of_matrices(world, num_matrices):
    """The rows that a process gets of a matrix of several ones, and the gradient that comes back."""
    height = 6 * num_matrices
    whole, gradient = numbers(height, DIM), numbers(height, DIM, seed=1)
    each = height // num_matrices // world.size

    def used(tensor, rank):
        parts = tensor.view(num_matrices, world.size, each, DIM)
        return parts[:, rank].reshape(-1, DIM)

    own = slice(world.rank * height // world.size, (world.rank + 1) * height // world.size)
    kept = whole[own].clone().requires_grad_()
    regrouped = Regrouped(Peers(dist.group.WORLD, world.size, world.rank), height, num_matrices)
    regrouped.regroup_rows(kept)
    with NothingIsSorted():
        rows = regrouped.regroup_rows(kept)
        rows.backward(used(gradient, world.rank))
    return torch.equal(rows, used(whole, world.rank)), torch.equal(kept.grad, gradient[own])


@pytest.mark.parametrize(("size", "num_matrices"), [(2, 3), (3, 3), (2, 2), (2, 1)])
def test_each_process_gets_its_rows_of_each_matrix(size, num_matrices):
    assert ranks.on(size, of_matrices, num_matrices) == [(True, True)] * size


def test_a_sequence_without_equal_parts_is_refused():
    with pytest.raises(ConfigError, match=r"parallel.tensor: a sequence of 7 places has no 2 equal parts"):
        Peers(None, 2, 0).take_own_part(torch.zeros(1, 7), 1)
