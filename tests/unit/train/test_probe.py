"""Models that are not a plain stack: each gives the numbers of one process, or is refused before its first step."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import ranks
from helpers.models import odd as odd_models
from helpers.models.odd import Loader
from torch import nn
from torch.distributed.tensor import DTensor

from kftrain import config
from kftrain.errors import ConfigError, UserCodeError
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.world import World
from kftrain.tasks import build_task
from kftrain.train import probe, session

STEPS = 5


@dataclass
class Trained:
    losses: list
    weights: dict
    dtypes: set


def take_steps(world, overrides, num_micro=1):
    """Losses of a few steps and the weights after them."""
    resolved = config.parse("{task: {kind: 'helpers.models.odd:Task'}, optimizer: {warmup_steps: 1}}", overrides)
    task, loader = build_task(resolved.task), Loader(world, num_micro)
    engine, _ = session.build(resolved, task, loader, Mesh(resolved.parallel.shape(world.size), world))
    losses = [
        world.sum([float(engine.step(batch, 8, world.sum).local_loss_sum)])[0] for batch in loader.steps(0, STEPS)
    ]
    parameters = dict(engine.model.named_parameters()).items()
    weights = {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in parameters}
    return Trained(
        losses, {name: each.numpy() for name, each in weights.items()}, {str(w.dtype) for w in weights.values()}
    )


def on_one_and_two(*overrides, num_micro=1):
    """Of one process, and of both of two."""
    (alone,) = ranks.on(1, take_steps, list(overrides), num_micro)
    return alone, ranks.on(2, take_steps, list(overrides), num_micro)


def assert_alike(alone, both, tolerance=1e-5):
    for each in both:
        assert isinstance(each, Trained) and isinstance(alone, Trained), (alone, each)
        assert each.losses == pytest.approx(alone.losses, rel=tolerance)
        assert each.weights.keys() == alone.weights.keys() and each.dtypes == {"torch.float32"}
        for name, weight in alone.weights.items():
            np.testing.assert_allclose(each.weights[name], weight, rtol=tolerance, atol=tolerance)
    assert alone.losses[-1] != alone.losses[0]


def kind(name, **options):
    return [f"model.kind=helpers.models.odd:{name}", *(f"model.{key}={value}" for key, value in options.items())]


WORKING = [
    kind("Experts"),
    kind("OnlyExperts"),
    kind("BlocksAttribute"),
    kind("BlocksAttribute", sequential="true"),
    kind("Shared"),
    kind("TiedHead"),
    kind("ByMethod"),
    kind("Frozen"),
    kind("MixedTypes"),
    kind("Codebook", average="false"),
    kind("Statistics"),
    kind("Recurrent"),
    kind("Normalised"),
    kind("ReadsItsTensors"),
    kind("CallsTwice"),
]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize("model", WORKING, ids=lambda model: model[-1].rpartition(":")[2])
def test_two_processes_compute_what_one_does(model, strategy):
    assert_alike(*on_one_and_two(*model, f"parallel.strategy={strategy}"))


def test_ranks_that_call_different_experts_compute_what_one_process_does():
    assert_alike(*on_one_and_two(*kind("OnlyExperts")))


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_auxiliary_terms_and_what_a_model_does_after_a_step_are_those_of_one_process(strategy):
    alone, both = on_one_and_two(*kind("Balanced"), f"parallel.strategy={strategy}", "optimizer.learning_rate=0.01")
    assert_alike(alone, both)
    assert alone.losses == pytest.approx(list(bare_losses(odd_models.Balanced, 0.01)), rel=1e-5)


def bare_losses(build, rate):
    """Of plain torch over whole batches."""
    torch.manual_seed(0)
    model, bias = build(), torch.zeros(odd_models.DIM)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    settings = config.parse("{}").optimizer
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        lr=rate,
    )
    for step in range(STEPS):
        x = np.abs(np.random.default_rng(step).normal(size=(odd_models.ROWS, odd_models.DIM))).astype(np.float32)
        x[odd_models.ROWS // 2 :] *= -1
        out = odd_models.Stack.forward(model, torch.from_numpy(x)) + bias
        loss = ((out.sum(-1) - 1).square() + 0.3 * out.square().mean(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bias += 0.1 * torch.from_numpy((x > 0).sum(0))
        yield loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Experts", "Stack", "BlocksAttribute"])
def test_so_they_do_with_micro_batches_and_recomputed_blocks(name):
    settings = ["train.activation_checkpointing=blocks", "parallel.reshard_after_forward=false"]
    assert_alike(*on_one_and_two(*kind(name), *settings, num_micro=2))


def test_what_no_process_uses_stays_as_it_was_drawn_and_what_one_uses_is_trained():
    alone, both = on_one_and_two(*kind("Experts"), "optimizer.weight_decay=10", "optimizer.learning_rate=0.05")
    torch.manual_seed(0)
    drawn = {name: parameter.detach().numpy() for name, parameter in odd_models.Experts().named_parameters()}
    for trained in (alone, *both):
        same = {name for name, weight in trained.weights.items() if np.array_equal(weight, drawn[name])}
        assert same == {"experts.2.weight", "experts.2.bias", "spare.weight", "spare.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("model", [kind("Stack"), kind("PositionBuffer"), kind("MixedTypes"), kind("BlocksAttribute")])
def test_bf16_is_one_computation_for_all_strategies(model):
    results = {}
    for strategy in ("fsdp", "ddp"):
        settings = [*model, "precision.compute=bf16", f"parallel.strategy={strategy}"]
        results[strategy] = on_one_and_two(*settings)
    (one, two), (replicated, two_replicated) = results["fsdp"], results["ddp"]
    assert one.losses == replicated.losses
    assert all(np.array_equal(weight, replicated.weights[name]) for name, weight in one.weights.items())
    assert two[0].losses == pytest.approx(two_replicated[0].losses, rel=1e-6)
    assert two[0].losses[0] == pytest.approx(one.losses[0], rel=1e-6), "before the first update"
    assert two[0].losses == pytest.approx(one.losses, rel=1e-3)
    assert one.dtypes == {"torch.float32"}


REFUSED = [
    (kind("NamedExperts"), 2, "ConfigError: model.blocks: names a module whose forward is not called"),
    (kind("NamedByMethod"), 2, "ConfigError: model.blocks: names a module whose forward is not called"),
    (kind("NamedByMethod"), 1, "ConfigError: model.blocks: names a module whose forward is not called"),
    (kind("Codebook"), 2, "ConfigError: model codes: a buffer that the forward pass changes differs"),
    (kind("DropsLayers"), 2, "UserCodeError: model.forward: the blocks are not called as they were at first"),
    (kind("NoDescription"), 1, "UserCodeError: model.export_config: TypeError"),
    (
        [*kind("PositionBuffer", inside="true"), "precision.compute=bf16"],
        1,
        "ConfigError: precision.compute: the model cannot be computed in bf16: RuntimeError",
    ),
]


@pytest.mark.parametrize(("settings", "size", "message"), REFUSED)
def test_the_rest_is_refused_in_one_line_on_all_processes(settings, size, message):
    for answer in ranks.on(size, take_steps, settings):
        assert isinstance(answer, str) and answer.startswith(message) and "\n" not in answer


def test_a_moving_average_may_be_kept_by_one_process():
    (alone,) = ranks.on(1, take_steps, kind("Codebook"))
    assert isinstance(alone, Trained)


ALONE = World(0, 1, torch.device("cpu"), None, None)


class Restless(nn.Module):
    """Changes all that a model can: buffers in place and anew, its own parameters, and three random generators."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(odd_models.DIM))
        self.twin = self.weight
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("anew", torch.zeros(2))
        self.register_buffer("same", torch.zeros(2))

    def forward(self, x):
        assert self.twin is self.weight
        self.in_place += torch.rand(2) + random.random() + np.random.rand()
        self.anew = self.anew + 1
        with torch.no_grad():
            self.weight.mul_(2)
        return x * self.weight


def seed_all():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def look(model, task=None, device=ALONE.device):
    micro = next(Loader(ALONE).steps(0, 1)).micro_batches[0]
    return probe.observe_loss(model, task or odd_models.Task(), micro, [], device, (0, 0))


def test_a_probe_leaves_weights_buffers_and_generators_as_they_were_and_says_what_changed():
    model = Restless()
    weight, buffers = model.weight, dict(model.named_buffers())
    seed_all()
    expected = torch.rand(1), random.random(), np.random.rand()
    seed_all()
    seen = look(model)
    assert seen.calls == [[""]] and seen.changed.keys() == {"in_place", "anew"}
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    assert model.weight is weight and model.twin is weight and torch.equal(weight, torch.ones(odd_models.DIM))
    assert weight.grad is None
    assert all(buffer is buffers[name] and not buffer.any() for name, buffer in model.named_buffers())
    assert not model._forward_pre_hooks


def test_a_probe_that_fails_leaves_the_model_as_it_was():
    class Task(odd_models.Task):
        def statistics(self, output, batch):
            raise ValueError("no")

    model = Restless()
    weight = model.weight
    with pytest.raises(UserCodeError, match=r"task.statistics: ValueError: no"):
        look(model, Task())
    assert model.weight is weight and model.training and not model.anew.any() and not model._forward_pre_hooks


@pytest.mark.parametrize("shape", [(1,), (2, 1), ()])
def test_statistics_of_another_shape_than_the_rows_are_refused(shape):
    class Task(odd_models.Task):
        def statistics(self, output, batch):
            return {"sum": torch.zeros(shape)}

    message = rf"task.statistics sum: must return one number for each of 2 rows, got \[{', '.join(map(str, shape))}\]"
    with pytest.raises(UserCodeError, match=message):
        look(odd_models.Stack(), Task())


def test_buffers_that_become_the_same_on_all_processes_may_change():
    probe.require_equal_buffers([probe.LossObservation([], {"steps": "a"}), probe.LossObservation([], {"steps": "a"})])
    with pytest.raises(ConfigError, match="model codes: "):
        probe.require_equal_buffers([probe.LossObservation([], {"codes": "a"}), probe.LossObservation([], {})])


def test_what_stands_beside_an_export_is_known_before_the_first_step():
    class NoSteps(Loader):
        def steps(self, first, count):
            pytest.fail("a batch was read")
            yield

    resolved = config.parse("{}", ["task.kind=helpers.models.odd:Task", *kind("NoDescription")])
    with pytest.raises(UserCodeError, match="export_config"):
        session.build(resolved, odd_models.Task(), NoSteps(ALONE), Mesh.of_copies(ALONE))


@pytest.mark.parametrize("dims", [{"y": 1}, {"x": 2}, {"x": 0}, {"x": 1, "wide": 1}])
def test_sequence_dims_that_batches_do_not_have_are_refused(dims):
    class Task(odd_models.Task):
        sequence_dims = dims

        def batch(self, arrays):
            batch = super().batch(arrays)
            return {**batch, "wide": torch.cat([batch["x"], batch["x"]], 1)}

        def inputs(self, batch):
            return (batch["x"],)

    with pytest.raises(UserCodeError, match=r"task.sequence_dims: does not fit the batch"):
        look(odd_models.Stack(), Task())
    Task.sequence_dims = {"x": 1}
    look(odd_models.Stack(), Task())


def test_a_dry_run_may_be_given_the_first_places_of_long_sequences():
    task = odd_models.Task()
    task.sequence_dims = {"x": 1}
    task.batch = lambda arrays: {"x": torch.arange(4000).view(2, 2000), "y": torch.ones(2)}
    probe.shorten_sequences(task, 12)
    short = task.batch({})
    assert short["x"].shape == (2, 516) and short["x"][1, 0] == 2000 and len(short["y"]) == 2


@pytest.mark.parametrize(("model", "num_passes"), [(odd_models.LayerDrop(), 8), (odd_models.Stack(), 1)])
def test_calls_that_may_depend_on_chance_are_looked_at_several_times(model, num_passes):
    micro = next(Loader(ALONE).steps(0, 1)).micro_batches[0]
    names = ["layers.0", "layers.1", "layers.2"]
    calls = probe.observe_loss(model, odd_models.Task(), micro, names, ALONE.device, (0, 0), None, 8).calls
    assert len(calls) == num_passes and len({tuple(each) for each in calls}) > (num_passes > 1)
