"""Our optimizers against torch's own, groups by pattern, and whose parameters are whose."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from kftrain.errors import ConfigError
from kftrain.train.optimizer import build_optimizer, freeze
from kftrain.train.optimizer_kinds import AdamW
from kftrain.train.settings import OptimizerConfig


class Net(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(2))
        self.kernel = nn.Parameter(torch.randn(2, 4, 3) / 3)
        self.head = nn.Linear(6, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * (1 + self.kernel.square().sum())


BLOCKS = ["blocks.0", "blocks.1"]


def config(kind, **options):
    return OptimizerConfig(kind=kind, learning_rate=0.05, weight_decay=0.1, **options)


def state_of(optimizer):
    return {parameter: kept for member in optimizer.members for parameter, kept in member.state.items()}


def stepped(model, optimizer, steps=5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 5, (8,), generator=generator)
        model.zero_grad()
        nn.functional.cross_entropy(model(ids), ids).backward()
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.step()
        else:
            optimizer.step(torch.zeros(()))
    return {name: each.detach() for name, each in model.named_parameters()}


class PaperLamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:1904.00962, number by number in double precision."""

    def __init__(self, model, rate, decay, betas, epsilon):
        super().__init__(model.parameters(), {})
        self.rate = rate
        self.decay = decay
        self.betas = betas
        self.epsilon = epsilon
        self.steps = 0
        self.moments = {each: ([0.0] * each.numel(), [0.0] * each.numel()) for each in model.parameters()}

    def step(self):
        self.steps += 1
        (beta1, beta2), t = self.betas, self.steps
        for parameter, (first, second) in self.moments.items():
            weights, decay = parameter.detach().flatten().tolist(), self.decay if parameter.dim() > 1 else 0.0
            update = []
            for i, gradient in enumerate(parameter.grad.flatten().tolist()):
                first[i] = beta1 * first[i] + (1 - beta1) * gradient
                second[i] = beta2 * second[i] + (1 - beta2) * gradient**2
                ratio = first[i] / (1 - beta1**t) / (math.sqrt(second[i] / (1 - beta2**t)) + self.epsilon)
                update.append(ratio + decay * weights[i])
            size, length = math.hypot(*weights), math.hypot(*update)
            scale = size / length if size > 0 and length > 0 else 1.0
            moved = [weight - self.rate * scale * each for weight, each in zip(weights, update, strict=True)]
            parameter.data.copy_(torch.tensor(moved).view_as(parameter))


def torchs(kind, model, **options):
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return getattr(torch.optim, kind)(groups, lr=0.05, **options)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (config("sgd"), lambda model: torchs("SGD", model, momentum=0.9)),
        (config("sgd", momentum=0.0), lambda model: torchs("SGD", model)),
        (config("sgd", momentum=0.7, nesterov=True), lambda model: torchs("SGD", model, momentum=0.7, nesterov=True)),
        (config("adafactor"), lambda model: torchs("Adafactor", model)),
        (config("adamw"), lambda model: torchs("AdamW", model, betas=(0.9, 0.95))),
        (config("lamb"), lambda model: PaperLamb(model, rate=0.05, decay=0.1, betas=(0.9, 0.95), epsilon=1e-8)),
    ],
)
def test_the_numbers_are_those_of_torchs_own(ours, theirs):
    torch.manual_seed(0)
    model = Net()
    other = copy.deepcopy(model)
    found, expected = stepped(model, build_optimizer(model, ours)), stepped(other, theirs(other))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (3, 8)])
def test_muon_in_bf16_has_the_numbers_of_torchs_own(nesterov, scale, shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    other = copy.deepcopy(model)
    ours = build_optimizer(
        model, config("muon", nesterov=nesterov, muon_scale=scale, momentum=0.9), ["0"], torch.bfloat16
    )
    theirs = torch.optim.Muon(
        other.parameters(), lr=0.05, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=scale, momentum=0.9
    )
    for _ in range(4):
        gradient = torch.randn(shape)
        model[0].weight.grad, other[0].weight.grad = gradient.clone(), gradient.clone()
        ours.step(torch.zeros(()))
        theirs.step()
        torch.testing.assert_close(model[0].weight, other[0].weight, rtol=1e-6, atol=1e-6)


def names_in(model, groups):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [sorted(names[each] for each in group["params"]) for group in groups]


def test_muon_has_the_matrices_of_blocks_and_adamw_the_rest():
    model = Net()
    hidden, rest = build_optimizer(model, config("muon"), BLOCKS).members
    assert names_in(model, hidden.param_groups) == [["blocks.0.0.weight", "blocks.1.0.weight"]]
    assert isinstance(rest, AdamW)
    decayed, others = names_in(model, rest.param_groups)
    assert decayed == ["embed.weight", "head.weight", "kernel"] and len(others) == 6
    assert {group["weight_decay"] for group in hidden.param_groups} == {0.1}


def test_an_embedding_within_a_block_is_not_muons_and_a_group_may_say_otherwise():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3))
    hidden, _ = build_optimizer(model, config("muon"), ["0", "1"]).members
    assert names_in(model, hidden.param_groups) == [["1.weight"]]
    groups = ({"pattern": "0.weight", "muon": True}, {"pattern": "1.*", "muon": False})
    hidden, _ = build_optimizer(model, config("muon", groups=groups), ["0", "1"]).members
    assert names_in(model, hidden.param_groups) == [["0.weight"]]


def test_a_model_without_a_matrix_for_muon_is_refused():
    with pytest.raises(ConfigError, match="no matrices within blocks") as raised:
        build_optimizer(Net(), config("muon"), [])
    assert "optimizer.groups" in raised.value.line


def test_the_first_pattern_that_fits_counts_and_rates_are_multiples():
    model = Net()
    groups = (
        {"pattern": "blocks.0.*", "learning_rate_scale": 0.5, "weight_decay": 0.0},
        {"pattern": "blocks.*.1.*", "weight_decay": 0.3},
    )
    optimizer = build_optimizer(model, config("adamw", groups=groups))
    optimizer.set_learning_rate(0.2)
    found = dict(
        itertools.chain.from_iterable(
            [(name, (group["lr"], group["weight_decay"])) for name in names]
            for names, group in zip(
                names_in(model, optimizer.members[0].param_groups), optimizer.members[0].param_groups, strict=True
            )
        )
    )
    assert len(found) == len(list(model.parameters()))
    assert found["blocks.0.0.weight"] == found["blocks.0.1.bias"] == (0.1, 0.0)
    assert found["blocks.1.1.weight"] == (0.2, 0.3)
    assert found["blocks.1.0.bias"] == (0.2, 0.0) and found["head.weight"] == (0.2, 0.1)


def test_a_tied_weight_is_in_one_group_by_any_of_its_names():
    model = Net(tied=True)
    optimizer = build_optimizer(model, config("adamw", groups=({"pattern": "head.*", "learning_rate_scale": 3.0},)))
    assert names_in(model, optimizer.members[0].param_groups)[0] == ["embed.weight"]
    optimizer.set_learning_rate(1.0)
    assert [group["lr"] for group in optimizer.members[0].param_groups] == [3.0, 1.0, 1.0]


def test_a_pattern_that_fits_nothing_is_refused_with_near_names():
    with pytest.raises(ConfigError) as raised:
        build_optimizer(Net(), config("adamw", groups=({"pattern": "head.weigth"},)))
    assert raised.value.where == "optimizer.groups.0.pattern" and "head.weight" in raised.value.line


def test_frozen_parameters_have_no_gradient_and_no_state():
    model = Net(tied=True)
    groups = ({"pattern": "blocks.0.*", "frozen": True}, {"pattern": "*"})
    freeze(model, config("adamw", groups=groups).groups)
    optimizer = build_optimizer(model, config("adamw", groups=groups))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    after = stepped(model, optimizer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if not name.startswith("blocks.0.")}
    assert {parameter for parameter in state_of(optimizer)} == {p for p in model.parameters() if p.requires_grad}


def test_freezing_all_is_refused():
    with pytest.raises(ConfigError, match="nothing is trained"):
        freeze(Net(), config("adamw", groups=({"pattern": "*", "frozen": True},)).groups)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "adafactor", "lamb"])
def test_the_state_is_there_before_the_first_step(kind):
    model = Net()
    optimizer = build_optimizer(model, config(kind), BLOCKS)
    before = {parameter: set(kept) for parameter, kept in state_of(optimizer).items()}
    assert set(before) == set(model.parameters())
    stepped(model, optimizer, steps=1)
    assert {parameter: set(kept) for parameter, kept in state_of(optimizer).items()} == before


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "adafactor", "lamb"])
def test_a_parameter_without_a_gradient_is_left_alone(kind):
    model = Net()
    optimizer = build_optimizer(model, config(kind), BLOCKS)
    ids = torch.arange(5)
    nn.functional.cross_entropy(model(ids), ids).backward()
    model.blocks[0][0].weight.grad = None
    before = model.blocks[0][0].weight.detach().clone()
    optimizer.step(torch.zeros(()))
    assert torch.equal(model.blocks[0][0].weight, before)
    assert float(state_of(optimizer)[model.blocks[0][0].weight]["step"]) == 0
    assert float(state_of(optimizer)[model.blocks[1][0].weight]["step"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "adamw", "momentum": 0.9}, "momentum is of sgd and muon"),
        ({"kind": "sgd", "muon_scale": "original"}, "muon_scale is of muon"),
        ({"kind": "adafactor", "nesterov": True}, "nesterov is of sgd and muon"),
        ({"kind": "sgd", "momentum": 0.0, "nesterov": True}, "nesterov needs a momentum"),
        ({"kind": "adamw", "groups": ({"pattern": "x", "muon": True},)}, "muon in groups is of muon"),
        ({"groups": ({"pattern": "x", "learning_rate_scale": 0.0},)}, "frozen: true"),
        ({"groups": ({"pattern": "x", "frozen": True, "weight_decay": 0.1},)}, "no other settings"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_the_identity_of_a_training_of_before_is_as_it_was():
    before = {
        **{"kind": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
        **{"schedule": "warmup_cosine", "warmup_steps": 50, "final_learning_rate_fraction": 0.1},
    }
    assert OptimizerConfig().identity() == OptimizerConfig(**before).identity() == before
    for name, value in {"momentum": 0.5, "decay_steps": 3, "groups": ({"pattern": "*"},)}.items():
        kind = {"kind": "sgd"} if name == "momentum" else {}
        assert name in OptimizerConfig(**kind, **{name: value}).identity()
