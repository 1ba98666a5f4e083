"""Moments in eight bits: torchao's levels, a bounded error, a quarter of the memory, nothing lost on the way."""

import contextlib
import copy

import pytest
import torch
from helpers import in_process, jobs
from helpers.models import regression
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torchao.optim import AdamW8bit as TorchaosAdamW8bit
from torchao.optim import quant_utils

from kftrain import config
from kftrain.core import storage
from kftrain.errors import ConfigError, Preempted
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.train.eight_bit import BLOCK_SIZE, AdamW8bit, Blocks, make_levels
from kftrain.train.optimizer_kinds import AdamW

BETAS, EPSILON, RATE = (0.9, 0.95), 1e-8, 1e-2
CPU = torch.device("cpu")


def values_of(seed, size, signed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-12, 4, (size,), generator=generator)
    return values if signed else values.square()


@pytest.mark.parametrize("signed", [True, False])
def test_the_levels_are_torchaos(signed):
    assert make_levels(signed, CPU).tolist() == torch.tensor(quant_utils.create_dynamic_map(signed)).tolist()


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(0, 1500), st.booleans())
def test_the_error_is_at_most_half_a_step_of_levels_and_what_is_quantized_stays(seed, size, signed):
    values = values_of(seed, size, signed)
    blocks = Blocks.quantize(values, signed)
    back = blocks.dequantize()
    widest = 0.5 * float(make_levels(signed, CPU).diff().max())
    for first in range(0, size, BLOCK_SIZE):
        block, found = values[first : first + BLOCK_SIZE], back[first : first + BLOCK_SIZE]
        assert float((found - block).abs().max()) <= 1.0001 * widest * float(block.abs().max())
        assert float(block.abs().max()) == float(found.abs().max()), "the largest one is exact"
    again = Blocks.quantize(back, signed)
    assert torch.equal(again.codes, blocks.codes) and torch.equal(again.scales, blocks.scales)


def layers_of_regression(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Linear(64, 1))
    return model, torch.randn(256, 64), torch.randn(256, 1)


def train(model, x, y, optimizer, num_steps=60):
    losses = []
    for _ in range(num_steps):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def ours(model, kind):
    return kind([{"params": list(model.parameters()), "weight_decay": 0.1}], RATE, BETAS, EPSILON)


def test_a_training_is_as_near_to_fp32_as_torchaos_own():
    (first, x, y), second, third = (
        layers_of_regression(),
        copy.deepcopy(layers_of_regression()[0]),
        copy.deepcopy(layers_of_regression()[0]),
    )
    in_fp32, found = train(first, x, y, ours(first, AdamW)), train(second, x, y, ours(second, AdamW8bit))
    with torch.compiler.set_stance("force_eager"):
        theirs = TorchaosAdamW8bit(third.parameters(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=0.1)
        expected = train(third, x, y, theirs)
    assert in_fp32[-1] < 0.5 * in_fp32[0]

    def error(losses):
        return max(abs(loss - plain) / plain for loss, plain in zip(losses[:30], in_fp32[:30], strict=True))

    assert 0 < error(found) <= 2 * error(expected) < 0.1


def bytes_of(optimizer):
    kept = [value for state in optimizer.state.values() for value in state.values()]
    blocks = [each for moments in getattr(optimizer, "_blocks", {}).values() for each in moments.values()]
    kept += [tensor for each in blocks for tensor in (each.codes, each.scales)]
    return sum(tensor.nbytes for tensor in kept)


def test_moments_take_a_quarter_of_the_memory():
    model = nn.Linear(512, 513, bias=False)
    assert bytes_of(ours(model, AdamW8bit)) <= 0.255 * bytes_of(ours(model, AdamW))
    small = nn.Linear(16, 16)
    assert bytes_of(ours(small, AdamW8bit)) == bytes_of(ours(small, AdamW))


def test_a_skipped_step_changes_nothing():
    model, x, y = layers_of_regression()
    optimizer = ours(model, AdamW8bit)
    train(model, x, y, optimizer, 3)

    def read():
        moments = [value.clone() for state in optimizer.state_dict()["state"].values() for value in state.values()]
        return [*moments, *(parameter.detach().clone() for parameter in model.parameters())]

    before, optimizer.found_inf = read(), torch.ones(())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, read(), strict=True))


TEXT = (
    regression.BASE
    + """
run: {name: eight, seed: 3}
model: {kind: "helpers.models.regression:Network", dim: 64}
optimizer: {learning_rate: 0.02, warmup_steps: 5, state: 8bit}
train: {steps: 12, global_batch_size: 10, log_interval_steps: 1}
"""
)


def exported(paths):
    uri = documents.read(Completion, paths.complete).export_uri
    return load_file(storage.local_path(uri) / "model.safetensors")


def test_a_resume_in_the_same_layout_is_exact_to_the_bit(tmp_path, monkeypatch):
    straight, resolved = jobs.prepare(tmp_path, TEXT, [], "straight")
    in_process.train(straight, resolved, monkeypatch)
    stopped, _ = jobs.prepare(tmp_path, TEXT, [], "stopped")
    with contextlib.suppress(Preempted):
        in_process.train(stopped, resolved, monkeypatch, in_process.StopAfter(7))
    assert [name.step for name in commit.list_committed(stopped)] == [7]
    in_process.train(stopped, resolved, monkeypatch)
    for name, value in exported(straight).items():
        assert torch.equal(exported(stopped)[name], value), name


def test_other_optimizers_refuse_it():
    with pytest.raises(ConfigError, match="state 8bit is of adamw, not of sgd"):
        config.parse("optimizer: {kind: sgd, state: 8bit}")
