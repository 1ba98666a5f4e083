"""Logits that are split over the vocabulary, against torch's functions on whole ones."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from helpers import ranks

from kftrain.parallel.tensor_exchange import Peers
from kftrain.parallel.vocabulary import SplitLogits, look_up

ROWS, PLACES, CLASSES = 3, 5, 11


def own_of(world):
    """The last process has fewer."""
    each = -(-CLASSES // world.size)
    return slice(world.rank * each, min(CLASSES, (world.rank + 1) * each))


def logits_of():
    """Large ones among them, and two rows whose largest logits are equal."""
    logits = 50 * torch.randn(ROWS, PLACES, CLASSES, generator=torch.Generator().manual_seed(1))
    logits[0, 0] = 1000.0
    logits[1, 0, [2, 7]] = 900.0
    return logits


def of_split(world):
    targets = torch.randint(CLASSES, (ROWS, PLACES), generator=torch.Generator().manual_seed(2))
    weights = torch.rand(ROWS, PLACES, generator=torch.Generator().manual_seed(3))
    weights[2] = 0.0
    whole = logits_of().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none").view(ROWS, PLACES)
    (expected * weights).sum().backward()
    peers = Peers(dist.group.WORLD, world.size, world.rank)
    own = own_of(world)
    part = logits_of()[..., own].clone().requires_grad_()
    split = SplitLogits(part, peers, CLASSES)
    losses = split.cross_entropy(targets)
    (losses * weights).sum().backward()
    again = part.detach().clone().requires_grad_()
    joined = SplitLogits(again, peers, CLASSES).whole()
    (F.cross_entropy(joined.flatten(0, 1), targets.flatten(), reduction="none") * weights.flatten()).sum().backward()
    return {
        "loss": torch.allclose(losses, expected, rtol=1e-5, atol=1e-5),
        "gradient": torch.allclose(part.grad, whole.grad[..., own], rtol=1e-5, atol=1e-6),
        "guesses": torch.equal(split.argmax(), whole.argmax(-1)),
        "whole": torch.equal(joined, whole),
        "gradient of the whole": torch.allclose(again.grad, whole.grad[..., own], rtol=1e-5, atol=1e-6),
    }


def test_losses_gradients_and_guesses_are_those_of_whole_logits():
    for size in (2, 3):
        for checks in ranks.on(size, of_split):
            assert all(checks.values()), checks


def of_table(world):
    """What tokens are looked up for, with a padding token, and the gradient of this process's part."""
    tokens = torch.tensor([[0, 5, 5, 10], [3, 7, 2, 7]])
    table = torch.randn(CLASSES, 4, generator=torch.Generator().manual_seed(4))
    whole = table.clone().requires_grad_()
    factors = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(5))
    expected = F.embedding(tokens, whole, padding_idx=7)
    (expected * factors).sum().backward()
    own = own_of(world)
    part = table[own].clone().requires_grad_()
    peers = Peers(dist.group.WORLD, world.size, world.rank)
    rows = look_up(tokens, part, own.start, padding=7)
    (rows * factors).sum().backward()
    return torch.equal(peers.sum_over_all(rows.detach()), expected), torch.equal(part.grad, whole.grad[own])


def test_each_process_looks_up_its_own_tokens():
    assert ranks.on(3, of_table) == [(True, True)] * 3
