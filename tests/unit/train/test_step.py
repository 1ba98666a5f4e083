"""One optimizer step, on one process, against plain torch."""

import copy

import numpy as np
import pytest
import torch
from helpers import in_process
from torch import nn

from kftrain.data.loader import MicroBatch, StepBatch
from kftrain.errors import UserCodeError
from kftrain.models import ModelOutput
from kftrain.parallel.buffers import CombinedBuffers
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.transforms import distribute, list_transforms
from kftrain.train.optimizer import Optimizer
from kftrain.train.optimizer_kinds import Sgd
from kftrain.train.spmd import SpmdEngine
from kftrain.train.step import compute_loss_sum, count_loss_terms, receive_tensors, seed_step


class Sums:
    """The loss is the weighted sum of squared outputs; a row counts `terms` times."""

    def count_terms(self, arrays):
        return arrays["terms"]

    def batch(self, arrays):
        return {"x": torch.from_numpy(arrays["x"])}

    def inputs(self, batch):
        return (batch["x"],)

    def loss(self, output, batch, weight):
        return (output.squeeze(-1).square() * weight).sum()


def micro(rows, padding=0, value=1.0, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32) * value
    weight = np.r_[np.ones(rows - padding), np.zeros(padding)].astype(np.float32)
    return MicroBatch({"x": x, "terms": np.arange(1, rows + 1)}, weight)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 1))


@pytest.fixture
def world(monkeypatch):
    with in_process.world(monkeypatch) as joined:
        yield joined


def stepper(world, model, clip_norm=0.0, lr=0.1, task=None):
    mesh = Mesh.of_copies(world)
    strategy = list_transforms(ParallelConfig(), PrecisionConfig(), [], mesh.shape)
    distributed = distribute(model, strategy, mesh, [])
    optimizer = Optimizer({Sgd([{"params": list(model.parameters())}], lr, 0.0, False): [1.0]})
    return SpmdEngine(distributed, optimizer, task or Sums(), [""], clip_norm, CombinedBuffers(model, world))


def alone(values):
    """The exchange of one process."""
    return values


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_step_is_the_gradient_of_the_mean_over_all_terms(world):
    model = network()
    plain = copy.deepcopy(model)
    ours = stepper(world, model)
    parts = [micro(4, seed=1), micro(4, padding=2, seed=2)]
    num_terms = sum(int(count_loss_terms(Sums(), part).sum()) for part in parts)
    assert num_terms == (1 + 2 + 3 + 4) + (1 + 2)
    result = ours.step(StepBatch(0, parts, num_terms), num_terms, alone)
    rows = torch.from_numpy(np.concatenate([parts[0].arrays["x"], parts[1].arrays["x"][:2]]))
    loss = plain(rows).square().sum() / 13
    loss.backward()
    norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in plain.parameters()))
    assert float(result.local_loss_sum) == pytest.approx(loss.item(), rel=1e-6)
    assert float(result.gradient_norm) == pytest.approx(norm.item(), rel=1e-6)
    for parameter, found in zip(plain.parameters(), weights(ours.model), strict=True):
        torch.testing.assert_close(found, parameter.detach() - 0.1 * parameter.grad)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_gradient_longer_than_the_limit_is_scaled_down_to_it_and_a_shorter_one_is_left(world, share):
    before = weights(stepper(world, network()).model)
    batch = StepBatch(0, [micro(4)], 10)
    free = stepper(world, network(), lr=1.0)
    norm = float(free.step(batch, 10, alone).gradient_norm)
    limited = stepper(world, network(), clip_norm=share * norm, lr=1.0)
    assert float(limited.step(batch, 10, alone).gradient_norm) == pytest.approx(norm), (
        "the norm is that before clipping"
    )
    for start, with_limit, without in zip(before, weights(limited.model), weights(free.model), strict=True):
        torch.testing.assert_close(with_limit - start, min(1.0, share) * (without - start), rtol=1e-4, atol=1e-7)


def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_is_taken(world):
    ours = stepper(world, network())
    before = weights(ours.model)
    found = ours.step(StepBatch(0, [micro(4), micro(4, value=float("inf"))], 10), 10, alone)
    assert not torch.isfinite(found.gradient_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(ours.model), strict=True))
    again = stepper(world, network())
    assert ours.step(StepBatch(0, [micro(4)], 10), 10, alone) == again.step(StepBatch(0, [micro(4)], 10), 10, alone)
    assert all(torch.equal(a, b) for a, b in zip(weights(again.model), weights(ours.model), strict=True))


def test_gradients_do_not_pile_up_from_step_to_step(world):
    ours = stepper(world, network(), lr=1e-30)
    norms = {float(ours.step(StepBatch(0, [micro(4)], 10), 10, alone).gradient_norm) for _ in range(3)}
    assert len(norms) == 1


def test_each_module_trains_in_the_mode_that_it_was_given(world):
    model = network()
    model[2].eval()
    ours = stepper(world, model)
    ours.model.eval()  # as a user's statistics may leave it
    seen = []
    model[3].register_forward_hook(lambda *_: seen.append([m.training for m in model]))
    ours.step(StepBatch(0, [micro(4)], 10), 10, alone)
    assert seen == [[True, True, False, True]]


def test_every_step_and_rank_has_random_numbers_of_its_own():
    def drawn(*seed):
        seed_step(*seed, torch.device("cpu"))
        return tuple(torch.rand(4).tolist())

    places = [(seed, step, rank) for seed in (0, 1) for step in (0, 1, 10) for rank in (0, 1)]
    assert len({drawn(*place) for place in places}) == len(places)
    assert drawn(1, 10, 1) == drawn(1, 10, 1)


@pytest.mark.parametrize("counts", [np.ones((4, 1)), np.ones(()), np.ones(3)])
def test_terms_of_another_shape_are_refused(counts):
    class Task(Sums):
        def count_terms(self, arrays):
            return counts

    message = (
        rf"task.count_terms: must return one number for each of 4 rows, got \[{', '.join(map(str, counts.shape))}\]"
    )
    with pytest.raises(UserCodeError, match=message):
        count_loss_terms(Task(), micro(4))


@pytest.mark.parametrize(
    ("loss", "found"), [(lambda x: x, r"\[16\]"), (lambda x: x.sum().reshape(1), r"\[1\]"), (lambda x: 3.0, "float")]
)
def test_a_loss_that_is_no_scalar_is_refused(loss, found):
    class Task(Sums):
        def loss(self, output, batch, weight):
            return loss(output.squeeze(-1))

    with pytest.raises(UserCodeError, match=rf"^task.loss: must return a scalar, got {found}") as caught:
        compute_loss_sum(network(), Task(), receive_tensors(Task(), micro(16), torch.device("cpu")))
    assert caught.value.exit_code == 16


class WithAuxiliary(nn.Module):
    """Squares of the features beside its output, and a count of what was done after steps."""

    def __init__(self, shape=(-1,)):
        super().__init__()
        self.network = network()
        self.shape = shape
        self.num_steps = 0

    def forward(self, x):
        return ModelOutput(self.network(x), x.square().sum(-1).reshape(self.shape) * self.network[0].bias[0])

    def after_step(self):
        assert not torch.is_grad_enabled()
        self.num_steps += 1


def test_auxiliary_terms_are_added_to_each_term_of_their_row_and_padding_has_none():
    model, part = WithAuxiliary(), micro(5, padding=2)
    x, factor = torch.from_numpy(part.arrays["x"][:3]), model.network[0].bias[0]
    expected = model.network(x).square().sum() + sum((row + 1) * x[row].square().sum() * factor for row in range(3))
    found = compute_loss_sum(model, Sums(), receive_tensors(Sums(), part, torch.device("cpu")))
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = [torch.autograd.grad(each, model.network[0].bias)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)
    with pytest.raises(UserCodeError, match=r"model.forward auxiliary: must return one number for each of 5 rows"):
        compute_loss_sum(WithAuxiliary((-1, 1)), Sums(), receive_tensors(Sums(), part, torch.device("cpu")))


def test_the_model_is_called_after_each_step_that_was_taken(world):
    model = WithAuxiliary()
    ours = stepper(world, model)
    ours.step(StepBatch(0, [micro(4), micro(4)], 20), 20, alone)
    assert model.num_steps == 1
    skipped = ours.step(StepBatch(0, [micro(4, value=float("inf"))], 10), 10, alone)
    assert not torch.isfinite(skipped.gradient_norm) and model.num_steps == 1


def test_arguments_of_the_model_that_are_no_tuple_are_refused():
    class Task(Sums):
        def inputs(self, batch):
            return batch["x"]

    with pytest.raises(UserCodeError, match=r"task.inputs: must return a tuple, got Tensor.*return \(tensor,\)"):
        compute_loss_sum(network(), Task(), receive_tensors(Task(), micro(4), torch.device("cpu")))


def test_a_loss_of_nothing_that_is_trained_is_refused():
    model = network().requires_grad_(False)
    with pytest.raises(UserCodeError, match=r"task.loss: depends on no parameter that is trained"):
        compute_loss_sum(model, Sums(), receive_tensors(Sums(), micro(4), torch.device("cpu")))
