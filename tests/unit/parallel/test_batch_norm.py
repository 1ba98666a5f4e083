"""Batch norms of several processes against torch's own on one; that they train so is a row of the table of parity."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ranks
from torch import nn

from kftrain.errors import ConfigError, UserCodeError
from kftrain.parallel.batch_norm import GlobalBatchNorms
from kftrain.parallel.mesh import Mesh

TWO = SimpleNamespace(num_data_ranks=2)
ALONE = SimpleNamespace(num_data_ranks=1, world=SimpleNamespace(device=torch.device("cpu")))

ROWS = torch.from_numpy(np.random.default_rng(3).normal(2.0, 3.0, (7, 3, 4)).astype(np.float32))
SHARES = (slice(0, 5), slice(5, 7))
"""Uneven; the second process fills up its share with rows that do not count."""


def norm(momentum):
    torch.manual_seed(0)
    module = nn.BatchNorm1d(3, momentum=momentum)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    return module


def computed(world, momentum):
    module = norm(momentum)
    norms = GlobalBatchNorms(module, Mesh.of_copies(world))
    norms.connect(1, False)
    own = ROWS[SHARES[world.rank]]
    for _ in range(2):
        x = torch.full((5, 3, 4), 99.0)
        x[: len(own)] = own
        x.requires_grad_()
        weight = np.r_[np.ones(len(own)), np.zeros(5 - len(own))].astype(np.float32)
        norms.begin(torch.from_numpy(weight))
        out = module(x)
        (out[: len(own)].square().sum() * (1 + world.rank)).backward()
    results = [out[: len(own)], x.grad[: len(own)], module.weight.grad, *module.buffers()]
    return [result.detach().tolist() for result in results], float(x.grad[len(own) :].abs().sum())


@pytest.mark.parametrize("momentum", [0.3, None])
def test_outputs_gradients_and_running_statistics_are_those_of_one_process(momentum):
    answers = ranks.on(2, computed, momentum)
    module = norm(momentum)
    for _ in range(2):
        x = ROWS.clone().requires_grad_()
        out = module(x)
        (out[SHARES[0]].square().sum() + 2 * out[SHARES[1]].square().sum()).backward()
    for (results, padding), share in zip(answers, SHARES, strict=True):
        assert padding == 0.0
        for ours, theirs in zip(results[:2], (out[share], x.grad[share]), strict=True):
            torch.testing.assert_close(torch.tensor(ours), theirs.detach(), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(results[3:], module.buffers(), strict=True):
            torch.testing.assert_close(torch.tensor(ours, dtype=theirs.dtype), theirs, rtol=1e-5, atol=1e-6)
    total = torch.tensor(answers[0][0][2]) + torch.tensor(answers[1][0][2])
    torch.testing.assert_close(total, module.weight.grad, rtol=1e-4, atol=1e-4)


def test_on_one_process_a_row_that_does_not_count_is_in_no_statistic():
    module, plain = norm(0.1), norm(0.1)
    norms = GlobalBatchNorms(module, ALONE)
    norms.connect(3, True)  # each micro batch by itself, as everybody does
    torch.testing.assert_close(module(ROWS), plain(ROWS))
    norms.begin(torch.tensor([1, 1, 1, 0, 1, 1, 1], dtype=torch.float32))
    kept = ROWS[[0, 1, 2, 4, 5, 6]]
    torch.testing.assert_close(module(ROWS)[[0, 1, 2, 4, 5, 6]], plain(kept))
    torch.testing.assert_close(module.running_var, plain.running_var)
    flat = ROWS.permute(0, 2, 1).reshape(28, 3)  # the places of each row, one after the other
    torch.testing.assert_close(module(flat)[:4], plain(kept.permute(0, 2, 1).reshape(24, 3))[:4], rtol=1e-5, atol=1e-5)
    module.eval()
    torch.testing.assert_close(module(ROWS), plain.eval()(ROWS))
    with pytest.raises(UserCodeError, match="3 entries for 7 rows"):
        module.train()(ROWS[:3])


def test_in_bf16_it_trains_and_evaluates_and_keeps_statistics_in_fp32():
    module, plain = norm(0.1), norm(0.1)
    GlobalBatchNorms(module, ALONE)
    for key in ("weight", "bias"):
        module._parameters[key] = nn.Parameter(getattr(module, key).detach().bfloat16())
    for mode in (True, False):
        out, exact = module.train(mode)(ROWS.bfloat16()), plain.train(mode)(ROWS)
        assert out.dtype == torch.bfloat16 and module.running_var.dtype == torch.float32
        torch.testing.assert_close(out.float(), exact, rtol=0.02, atol=0.05)
    torch.testing.assert_close(module.running_var, plain.running_var, rtol=0.01, atol=0.01)


class Own(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 2


def test_what_cannot_be_synchronised_is_refused_by_name():
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(Own(1)))
    with pytest.raises(ConfigError, match=r"module 1\.0: .*forward of its own.*Own.*GroupNorm"):
        GlobalBatchNorms(model, TWO)
    with pytest.raises(ConfigError, match="without running statistics"):
        GlobalBatchNorms(nn.Sequential(nn.BatchNorm1d(1, track_running_stats=False).eval()), TWO)
    norms = GlobalBatchNorms(nn.Sequential(nn.BatchNorm1d(1).eval(), nn.GroupNorm(1, 1), nn.SyncBatchNorm(1)), TWO)
    assert {name.split(".")[0] for name in norms.buffer_names} == {"2"}, "what is kept in evaluation mode sees no batch"


@pytest.mark.parametrize(
    ("settings", "message"),
    [((2, False), "train.micro_batch_size: .*2 micro batches"), ((1, True), "train.activation_checkpointing: ")],
)
def test_statistics_that_would_depend_on_the_layout_are_refused(settings, message):
    norms = GlobalBatchNorms(nn.BatchNorm1d(1), TWO)
    with pytest.raises(ConfigError, match=message):
        norms.connect(*settings)


def test_one_value_of_each_channel_is_refused_as_torch_does():
    module = norm(None)
    norms = GlobalBatchNorms(module, ALONE)
    module(torch.ones(1, 3))  # before the first step nothing counts yet
    norms.begin(torch.ones(1))
    with pytest.raises(ConfigError, match="one value of each channel"):
        module(torch.ones(1, 3))
    assert module(ROWS[:1]).shape == (1, 3, 4)
