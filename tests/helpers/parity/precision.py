"""Cases in fp16: the bare loop casts by hand and asks torch's own `GradScaler`; overflows that are made on purpose."""

import contextlib
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from helpers.parity import optimizers, resume
from helpers.parity import rank as parity_rank
from helpers.parity.defects import patched
from helpers.parity.models import FEATURES, Plain
from helpers.parity.oracle import STEPS, VOCABULARY, Case, Curve, same_llama
from helpers.parity.table import follow

from kftrain.models.transformer import Transformer
from kftrain.parallel import gradients
from kftrain.parallel.mesh import Mesh
from kftrain.train import loop as loop_module
from kftrain.train import pipelined, step
from kftrain.train.loss_scale import PART, LossScale
from kftrain.train.spmd import SpmdEngine


@dataclass(frozen=True)
class Scaling:
    """What the configuration says under `precision`."""

    initial: float = 2.0**16
    interval: int = 2000
    minimum: float = 1.0
    sums_in_fp16: bool = False
    injected: tuple[int, ...] = ()
    """Steps in which a gradient becomes infinite."""
    limit: float = math.inf
    """Largest number in a gradient; larger ones are made this, an infinite one, too."""

    @property
    def overrides(self):
        keys = {"initial": self.initial, "growth_interval_steps": self.interval, "minimum": self.minimum}
        scale = [f"precision.loss_scale.{name}={value}" for name, value in keys.items()]
        return "precision.compute=fp16", *scale, *(["precision.reduce=fp16"] if self.sums_in_fp16 else [])


@dataclass(frozen=True)
class ScaledCurve(Curve):
    """A curve with the scale that each step had, and the number of steps that were skipped by then."""

    scales: list[float]
    num_skipped: list[int]


def loop(case, first_weights, parts, path, scaling):
    """As `oracle.run`, in fp16."""
    network = case.network()
    network.load_state_dict({name: torch.tensor(value) for name, value in first_weights.items()})
    network.train()
    optimizer, data, scales, skipped = case.optimizer(network), case.data(), [], []
    scaler = torch.amp.GradScaler("cpu", init_scale=scaling.initial, growth_interval=scaling.interval)
    num_rows, losses, norms = len(next(iter(data.values()))), [], []
    for number in range(STEPS):
        path.enter(network, number)
        scales.append(scaler.get_scale())
        places = (np.arange(case.batch) + number * case.batch) % num_rows
        batch, total = {name: rows[places] for name, rows in data.items()}, 0.0
        for part in parts or [list(range(case.batch))]:
            rows = {name: values[list(part)] for name, values in batch.items()}
            total += backward(case, network, rows, case.terms(batch), scaler, scaling.sums_in_fp16)
        if number in scaling.injected:
            next(network.parameters()).grad.view(-1)[0] = math.inf
        scaler.unscale_(optimizer)
        for parameter in network.parameters():
            parameter.grad.clamp_(-scaling.limit, scaling.limit)
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), case.clip)
        if any(scaler._found_inf_per_device(optimizer).values()):
            norm = math.inf
        for group in optimizer.param_groups:
            group["lr"] = case.rate(number) * group.get("factor", 1.0)
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scaling.minimum:
            scaler.update(scaling.minimum)
        optimizer.zero_grad()
        losses.append(total)
        norms.append(float(norm))
        skipped.append((skipped[-1] if skipped else 0) + (not math.isfinite(norms[-1])))
    weights = {name: value.detach() for name, value in network.state_dict().items()}
    return ScaledCurve(losses, norms, [case.rate(number) for number in range(STEPS)], weights, scales, skipped)


def backward(case, network, rows, num_terms, scaler, sums_in_fp16):
    """Adds the gradients of some rows, scaled, in fp32; their part of the mean loss."""
    rounded = {name: each.detach().half().requires_grad_() for name, each in network.named_parameters()}

    def compute(*inputs):
        return torch.func.functional_call(network, rounded, tuple(map(halve, inputs)))

    loss = case.loss(compute, rows) / num_terms
    made = torch.autograd.grad(scaler.scale(loss), list(rounded.values()))
    for parameter, gradient in zip(network.parameters(), made, strict=True):
        total = gradient.float() if parameter.grad is None else parameter.grad + gradient.float()
        parameter.grad = total.half().float() if sums_in_fp16 else total
    return float(loss.detach())


def halve(tensor):
    return tensor.half() if tensor.is_floating_point() else tensor


def tied_transformer():
    """kftrain's own: in fp16 every rounding counts."""
    return Transformer(
        vocab_size=VOCABULARY, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, tie_embeddings=True
    )


class Two(optimizers.Two):
    """With torch's own Muon, which iterates in bf16."""

    def __init__(self, network):
        super().__init__(network, adjust_lr_fn="match_rms_adamw")
        (hidden,) = (group["params"] for group in self.members[0].param_groups)
        self.members[0] = torch.optim.Muon(hidden, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
        self.param_groups = [group for member in self.members for group in member.param_groups]


def fp16(name="fp16", network=same_llama, overrides=(), scaling=None, **others):
    """A case in fp16."""
    scaling = scaling or Scaling()
    scaled = functools.partial(loop, scaling=scaling)
    return Case(name, (*scaling.overrides, *overrides), network, loop=scaled, loop_follows=True, **others)


# -- what each process has seen ----------------------------------------------------------------------------------------


def train(world, job):
    """Trains; what came of it on the first process, and on each process the scale of each step and the skips."""
    seen = []

    def note(scale, found_inf, update=LossScale.update):
        metrics = update(scale, found_inf)
        seen.append((float(metrics["loss_scale"]), int(metrics["skipped_steps"])))
        return metrics

    with patched(LossScale, "update", note):
        trained = parity_rank.train(world, job)
    return trained, seen


def attempt(world, job, folder, num_steps):
    """See `resume.attempt`; beside that, the lines of the log."""
    lines = []
    with patched(loop_module, "to_log", lines.append):
        trained = resume.attempt(world, job, folder, num_steps)
    return trained, lines


def check(row, answers):
    """Raises AssertionError where a process has another scale or skips other steps than the bare loop, or numbers."""
    for rank, answer in enumerate(answers):
        assert answer.kind == "done", f"{row.name}: process {rank} {answer.kind}: {answer.value}"
    trained = answers[0].value[0]
    curve = follow(row, trained)
    for rank, (_, seen) in enumerate(answer.value for answer in answers):
        expected = list(zip(curve.scales, curve.num_skipped, strict=True))
        assert seen == expected, f"{row.name}: scales and skips of process {rank}: {seen}, not {expected}"
    assert [point["loss_scale"] for point in trained.history] == curve.scales
    assert [point["skipped_steps"] for point in trained.history] == curve.num_skipped
    num_steps = STEPS if row.case.is_followed else row.compared_steps
    for name, values in (("loss", curve.losses), ("gradient_norm", curve.norms), ("learning_rate", curve.rates)):
        mine = [point.get(name, math.inf) for point in trained.history[:num_steps]]
        wanted = [value if math.isfinite(value) else math.inf for value in values[:num_steps]]
        np.testing.assert_allclose(mine, wanted, rtol=row.tolerance, err_msg=f"{row.name}: {name}")
    for name, value in curve.weights.items():
        np.testing.assert_allclose(
            trained.weights[name], value.numpy(), rtol=0, atol=row.weight_tolerance, err_msg=f"{row.name}: {name}"
        )


# -- models of one's own -----------------------------------------------------------------------------------------------

LIMIT = 0.1


class Limited(Plain):
    """Its hooks make every infinite gradient a small one."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))


class Faint(Plain):
    """Answers so faintly that the gradient of its answer, which is no smaller, is 0 in fp16 in its parameters."""

    def forward(self, x):
        return super().forward(x) * 2.0**-13


@functools.cache
def faint_rows():
    """Targets of its size."""
    generator = np.random.default_rng(11)
    x = generator.normal(size=(29, FEATURES)).astype(np.float32)
    return {"x": x, "y": (np.sin(x.sum(axis=1)) * 2.0**-13).astype(np.float32)}


# -- overflows that are made on purpose --------------------------------------------------------------------------------

OVERFLOWING = 5
"""Number of the step, from 0."""


@contextlib.contextmanager
def overflow_in_a_loss(rank, steps=(OVERFLOWING,)):
    """In some steps the gradient of one process's loss is infinite, as it is computed."""
    num_steps = []

    def scale_loss(engine, loss, scaled=SpmdEngine.scale_loss):
        made = scaled(engine, loss)
        if dist.get_rank() == rank and len(num_steps) in steps:
            made.register_hook(lambda gradient: gradient * math.inf)
        return made

    def unscale(scale, before=LossScale._unscale):
        num_steps.append(1)
        before(scale)

    with patched(SpmdEngine, "scale_loss", scale_loss), patched(LossScale, "_unscale", unscale):
        yield


@contextlib.contextmanager
def overflow_in_a_part(rank, steps=(OVERFLOWING,)):
    """In some steps a gradient of which one process has a part is infinite there."""
    num_steps = []

    def unscale(scale, before=LossScale._unscale):
        if dist.get_rank() == rank and len(num_steps) in steps:
            next(part for part in gradients.collect_local_gradients(scale._parameters) if part.numel()).view(-1)[0] = (
                math.inf
            )
        num_steps.append(1)
        before(scale)

    with patched(LossScale, "_unscale", unscale):
        yield


# -- broken on purpose -------------------------------------------------------------------------------------------------


def skipped_by_one_process(rank):
    """Whoever sees an overflow skips the step, and no other process."""
    stack = contextlib.ExitStack()
    stack.enter_context(overflow_in_a_part(rank))
    stack.enter_context(patched(Mesh, "norm_group", lambda mesh: None))
    return stack


def auxiliary_loss_without_scale():
    """The auxiliary loss is added to the loss that is scaled."""

    def finish(returned, *others, before=step.finish_loss_sum):
        output = returned if returned.auxiliary is None else returned._replace(auxiliary=returned.auxiliary / 2**16)
        return before(output, *others)

    defect = contextlib.ExitStack()
    for module in (step, pipelined):
        defect.enter_context(patched(module, "finish_loss_sum", finish))
    return defect


def scale_not_saved():
    """A checkpoint has no scale."""

    def apply(scale, distributed, blocks, before=LossScale.apply):
        before(scale, distributed, blocks)
        del distributed.parts[PART]

    return patched(LossScale, "apply", apply)


@contextlib.contextmanager
def scale_not_restored():
    """A resume reads the scale and leaves it there."""

    def save(scale, before=LossScale._save):
        return {name: tensor.clone() for name, tensor in before(scale).items()}

    with patched(LossScale, "_save", save), patched(LossScale, "_load", lambda scale, state: None):
        yield
