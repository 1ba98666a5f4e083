"""One process without a wrapper: its numbers are those of FSDP2 over one process, bit by bit."""

import pytest
import torch
from helpers import in_process
from torch import nn

from kftrain.models.transformer import Transformer
from kftrain.parallel.activations import CheckpointActivations
from kftrain.parallel.formats import WorkingCopies
from kftrain.parallel.fully_shard import FullyShard
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.strategies import resolve_sharding
from kftrain.parallel.transforms import Formats, ToDevice, distribute

FORMATS = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp16", "fp32"), ("fp16", "fp16")]


class Odd(nn.Module):
    """A shared matrix, one that no forward uses, a frozen one, a recurrent net, a buffer; blocks that are called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        self.spare = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.register_buffer("offset", torch.ones(4) / 3)

    def forward(self, x, *, scale):
        assert x.dtype == self.layers[0].weight.dtype == self.frozen.weight.dtype
        hidden, _ = self.recurrent(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.frozen(hidden).float() * scale.float() + self.offset


def gradients(world, transforms, blocks=()):
    torch.manual_seed(0)
    model = Odd()
    distributed = distribute(model, transforms, Mesh.of_copies(world), blocks)
    results = []
    for _ in range(2):
        with distributed.computing():
            for number in range(3):
                distributed.accumulate(is_last=number == 2)
                x = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
                model(x, scale=torch.tensor(0.7)).square().sum().backward()
        distributed.hand_over()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            local = gradient if gradient is None else getattr(gradient, "_local_tensor", gradient)
            results.append((name, None if local is None else local.clone()))
            parameter.grad = None
            with torch.no_grad():
                if local is not None:
                    getattr(parameter, "_local_tensor", parameter).sub_(0.1 * local)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}, "the masters are back"
    return results


@pytest.mark.parametrize(("compute", "reduce"), FORMATS)
def test_gradients_are_those_of_fsdp_over_one_process(monkeypatch, compute, reduce):
    with in_process.world(monkeypatch) as world:
        ours = gradients(world, [ToDevice(), Formats(compute, reduce)], ["recurrent"])
        theirs = gradients(world, [FullyShard(compute, reduce, resolve_sharding("fsdp", "step"))], ["recurrent"])
    assert [name for name, _ in ours] == [name for name, _ in theirs] and len(ours) > 10
    for (name, mine), (_, wanted) in zip(ours, theirs, strict=True):
        assert (mine is None) == (wanted is None) == name.startswith(("spare", "frozen")), name
        assert mine is None or (mine.dtype == torch.float32 and torch.equal(mine, wanted)), name


@pytest.mark.parametrize("method", ["blocks", "offload"])
def test_blocks_are_recomputed_in_the_format_of_the_computation(monkeypatch, method):
    within = CheckpointActivations(method, ["recurrent"])
    with in_process.world(monkeypatch) as world:
        plain = gradients(world, [ToDevice(), Formats("bf16", "fp32")], ["recurrent"])
        recomputed = gradients(world, [within, ToDevice(), Formats("bf16", "fp32")], ["recurrent"])
    for (name, one), (_, two) in zip(plain, recomputed, strict=True):
        assert (one is None and two is None) or torch.equal(one, two), name


class Tables(nn.Module):
    """A block that is given a tuple beside a tensor."""

    seen = ()

    def forward(self, x, tables):
        self.seen = [table.dtype if isinstance(table, torch.Tensor) else table for table in tables]
        return x


CASTS = [
    ((torch.ones(2), torch.arange(2)), True, [torch.float32, torch.int64]),
    ((torch.ones(2), torch.ones(2).double()), False, [torch.float32, torch.float32]),
    ((torch.ones(2), None), False, [torch.float32, None]),  # which may be a tensor the next time
]


@pytest.mark.parametrize(("tables", "goes", "seen"), CASTS)
def test_a_block_whose_arguments_fit_has_no_hook_after_its_first_call(monkeypatch, tables, goes, seen):
    with in_process.world(monkeypatch) as world:
        model = nn.Sequential()
        model.block = Tables()
        distribute(model, [ToDevice(), Formats("fp32", "fp32")], Mesh.of_copies(world), ["block"])
        model.block(torch.ones(2), tables)
        assert model.block.seen == seen and (not model.block._forward_pre_hooks) == goes


@pytest.mark.parametrize("attention", ["rows", "documents"])
def test_no_hook_stays_in_a_step_of_the_built_in_transformer(monkeypatch, attention):
    with in_process.world(monkeypatch) as world:
        sizes = {"vocab_size": 11, "dim": 8, "num_layers": 2, "num_heads": 2}
        model = Transformer(**sizes, document_token=0, attention=attention)
        names = ["model.layers.0", "model.layers.1"]
        distribute(model, [ToDevice(), Formats("fp32", "fp32")], Mesh.of_copies(world), names)
        assert sum(len(module._forward_pre_hooks) for module in model.modules()) == 3
        model(torch.arange(6).reshape(2, 3))
        assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("several", [False, True], ids=["said before each", "from the beginning"])
def test_gradients_of_micro_batches_are_summed_in_fp32_whatever_the_steps_before_had(several):
    torch.manual_seed(0)
    model, parts = nn.Linear(4, 3), [torch.randn(5, 4).bfloat16() for _ in range(2)]
    copies = WorkingCopies(model, torch.bfloat16, torch.float32, several)

    def take_step(parts):
        model.zero_grad()
        with copies.in_place():
            for number, part in enumerate(parts, start=1):
                copies.expect(is_last=number == len(parts))
                model(part).float().square().sum().backward()
        copies.hand_over()
        return model.weight.grad.clone()

    first, second = take_step(parts[:1]), take_step(parts[1:])
    assert torch.equal(take_step(parts), first + second)
    assert torch.equal(take_step(parts[:1]), first)
