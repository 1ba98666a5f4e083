"""What modules keep outside the state dict: a table or a last output does no harm; a state is refused."""

import copy
import threading

import pytest
import torch
from helpers import ranks
from helpers.models import odd as odd_models
from helpers.models.odd import Loader
from torch import nn

from kftrain import config
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import build_task
from kftrain.train import session
from kftrain.train.probe import lend_attributes

STEPS = 5


def losses_of(world, overrides):
    """Of a few steps; a checkpoint is asked for after each."""
    resolved = config.parse("{task: {kind: 'helpers.models.odd:Task'}, optimizer: {warmup_steps: 1}}", overrides)
    task, loader = build_task(resolved.task), Loader(world)
    engine, _ = session.build(resolved, task, loader, Mesh(resolved.parallel.shape(world.size), world))
    losses = []
    for batch in loader.steps(0, STEPS):
        losses += world.sum([float(engine.step(batch, 8, world.sum).local_loss_sum)])
        engine.state.save()
    return losses


def kind(name, **options):
    return [f"model.kind=helpers.models.odd:{name}", *(f"model.{key}={value}" for key, value in options.items())]


def first_loss(model):
    """Of a bare model, with the weights of the run's seed."""
    x = torch.from_numpy(
        next(Loader(type("World", (), {"size": 1, "rank": 0})).steps(0, 1)).micro_batches[0].arrays["x"]
    )
    return (model(x).sum(-1) - 1).square().mean().item()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "how", ["shows its last output", "computes a table once", "makes a table a buffer"], ids=lambda how: how
)
def test_what_a_forward_pass_only_shows_or_computes_once_does_no_harm(how, precision):
    settings = [*kind("Remembers", how=f"'{how}'"), f"precision.compute={precision}"]
    (alone,) = ranks.on(1, losses_of, settings)
    torch.manual_seed(0)
    tolerance = 1e-6 if precision == "fp32" else 0.05
    assert isinstance(alone, list) and alone[0] == pytest.approx(first_loss(odd_models.Remembers(how)), rel=tolerance)
    for both in ranks.on(2, losses_of, settings):
        assert both == pytest.approx(alone, rel=1e-5 if precision == "fp32" else 1e-2)


STATES = {
    "begins with its first rows": "center",
    "counts": "num_calls",
    "averages in a dict": "memo",
    "averages in a buffer": "average",
    "draws from a generator": "generator",
    "computes with the rows before": "",
}


@pytest.mark.parametrize("how", STATES)
def test_a_state_that_no_checkpoint_has_is_refused_unless_the_model_says_so(how):
    (line,) = ranks.on(1, losses_of, kind("Remembers", how=f"'{how}'"))
    where = f"ConfigError: model {STATES[how]}".rstrip()
    assert isinstance(line, str) and line.startswith(f"{where}: the forward pass keeps a state that no checkpoint has")
    (losses,) = ranks.on(1, losses_of, kind("RemembersOpenly", how=f"'{how}'"))
    assert isinstance(losses, list), losses


def test_what_a_forward_pass_computes_of_a_saved_buffer_is_no_state():
    (alone,) = ranks.on(1, losses_of, kind("Anneals"))
    torch.manual_seed(0)
    assert isinstance(alone, list) and alone[0] == pytest.approx(first_loss(odd_models.Anneals()), rel=1e-6)
    for both in ranks.on(2, losses_of, kind("Anneals")):
        assert both == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(("how", "name"), [("makes a saved buffer", "made"), ("makes a parameter", "scale")])
def test_what_checkpoints_hold_and_a_forward_pass_makes_is_refused(how, name):
    (line,) = ranks.on(1, losses_of, kind("Remembers", how=f"'{how}'"))
    assert line.startswith(f"ConfigError: model {name}: the forward pass makes a tensor that checkpoints hold"), line


def test_a_buffer_that_begins_to_differ_during_a_run_is_refused_before_it_is_saved():
    for line in ranks.on(2, losses_of, kind("LateCodebook")):
        assert line.startswith("UserCodeError: model codes: a buffer has become another one on each process"), line


@pytest.mark.parametrize("chance", ["torch", "numpy", "python"])
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_model_that_leaves_layers_out_at_random_is_trained(strategy, chance):
    first, second = ranks.on(2, losses_of, [*kind("LayerDrop", chance=chance), f"parallel.strategy={strategy}"])
    assert isinstance(first, list) and first == second and len(first) == STEPS


def test_blocks_that_are_left_out_at_random_are_refused_before_the_first_step_where_they_are_sharded():
    settings = kind("LayerDrop", declared="true")
    for line in ranks.on(2, losses_of, settings):
        assert line.startswith("ConfigError: model.blocks: names a module whose forward is not called in each"), line
    first, second = ranks.on(2, losses_of, [*settings, "parallel.strategy=ddp"])
    assert isinstance(first, list) and first == second
    assert all(isinstance(each, list) for each in ranks.on(1, losses_of, settings))


class Holder:
    def __init__(self):
        self.lock = threading.Lock()
        self.number = 1


class Keeper(nn.Module):
    """Holds what can be copied, and what cannot."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(2, 2)
        self.list = [torch.zeros(2), {"of": [1]}]
        self.lock = threading.Lock()
        self.generator = torch.Generator()
        self.alias = self.list
        self.holder = Holder()
        self.same = self.holder


def test_attributes_are_lent_as_copies_and_come_back_as_the_same_objects():
    model = Keeper()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    weights = list(model.inner._flat_weights)
    with lend_attributes(model):
        assert model.same is model.holder is before[""]["holder"]
        assert model.alias is model.list and model.lock is before[""]["lock"]
        model.list[0] += 1
        model.list[1]["of"].append(2)
        model.new, model.inner.other = 1, copy.copy(model)
        model.register_buffer("table", torch.zeros(1))
        model.inner.weight_ih_l0 = nn.Parameter(torch.zeros(8, 2))
    assert {name: dict(vars(module)) for name, module in model.named_modules()}.keys() == before.keys()
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[key] is value for key, value in before[name].items())
    assert not model.list[0].any() and model.list[1] == {"of": [1]} and not model._buffers
    assert all(one is other for one, other in zip(model.inner._flat_weights, weights, strict=True))
