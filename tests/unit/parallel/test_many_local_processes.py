"""Exchanges between 8 and 64 processes that are one: torch's LocalTensorMode computes what each of them has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from kftrain.parallel.context import SharedSequences
from kftrain.parallel.sequences import SequenceCut
from kftrain.parallel.tensor_exchange import Peers

ROWS, WIDTH = 2, 4


@pytest.fixture(params=[8, 64])
def size(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let this process stand for so many."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def attend_causally(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def cut_all(whole: torch.Tensor, size: int) -> LocalTensor:
    """Give every process its places of a sequence that lies along dim 2."""
    return LocalTensor({rank: SequenceCut(size, rank).take_part(whole, 2).clone() for rank in range(size)})


def assert_parts(actual: LocalTensor, whole: torch.Tensor, size: int) -> None:
    for rank in range(size):
        torch.testing.assert_close(actual._local_tensors[rank], SequenceCut(size, rank).take_part(whole, 2))


@pytest.mark.timeout(120)
def test_attention_by_heads_is_that_of_one_process(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    shape = (ROWS, size, 4 * size, WIDTH)
    wholes = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)]
    expected = attend_causally(*wholes[:3])
    expected.backward(wholes[3])
    shared = SharedSequences(Peers(dist.group.WORLD, size, 0), SequenceCut(size))
    with LocalTensorMode(size):
        parts = [cut_all(whole.detach(), size) for whole in wholes]
        inputs = [part.requires_grad_() for part in parts[:3]]
        attended = shared.attend_by_heads(attend_causally, *inputs, ())
        attended.backward(parts[3])
        assert_parts(attended, expected, size)
        for part, whole in zip(inputs, wholes, strict=False):
            assert_parts(part.grad, whole.grad, size)


@pytest.mark.timeout(120)
def test_summed_parts_are_the_parts_of_the_sum(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    wholes = torch.randn((size, size, 3), generator=generator, dtype=torch.float64)
    peers = Peers(dist.group.WORLD, size, 0)
    with LocalTensorMode(size):
        mine = LocalTensor({rank: wholes[rank].clone() for rank in range(size)})
        summed, everything = peers.sum_parts(mine), peers.sum_over_all(mine)
        stacked = peers.stack_parts(summed)
        for rank in range(size):
            torch.testing.assert_close(summed._local_tensors[rank], wholes.sum(0)[rank])
            torch.testing.assert_close(everything._local_tensors[rank], wholes.sum(0))
            torch.testing.assert_close(stacked._local_tensors[rank], wholes.sum(0))
