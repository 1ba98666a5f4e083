"""Models that are cut into stages, what the bare loop has for them, and a pipeline that is broken on purpose."""

import hashlib
from dataclasses import replace

import torch
from helpers.parity import models, oracle
from helpers.parity.defects import patched
from helpers.parity.models import DIM, case_of
from torch import nn
from torch.distributed.pipelining import PipelineStage

from kftrain.models.base import ModelPiece
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.shape import Shape
from kftrain.train import draws, pipelined, stage_modules

STEP_SEED_BITS = 63


class Staged(models.Plain):
    """Three residual blocks, of which the middle one costs much more, and parameters of the model itself."""

    widths = (DIM, 6 * DIM, DIM)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Wide(width) for width in self.widths)
        self.shift = nn.Parameter(torch.zeros(DIM))

    def begin(self, x):
        return self.enter(x) + self.shift

    def end(self, x):
        return self.leave(x).squeeze(-1)

    def stages(self):
        blocks = [ModelPiece(lambda hidden, _, layer=layer: layer(hidden), [layer]) for layer in self.layers]
        first = ModelPiece(lambda _, inputs: self.begin(*inputs), [self.enter, self])
        return [first, *blocks, ModelPiece(lambda hidden, _: self.end(hidden), [self.leave])]

    def forward(self, x):
        hidden = self.begin(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.end(hidden)


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(DIM, width)
        self.down = nn.Linear(width, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Pairs(Staged):
    """Two tensors travel from stage to stage, and the model adds a term of its own to the loss of each row."""

    def stages(self):
        def call(passed, layer):
            hidden, sizes = passed
            hidden = layer(hidden)
            return hidden, sizes + hidden.square().mean(-1)

        def begin(inputs):
            hidden = self.begin(*inputs)
            return hidden, hidden.square().mean(-1)

        blocks = [ModelPiece(lambda passed, _, layer=layer: call(passed, layer), [layer]) for layer in self.layers]
        last = ModelPiece(lambda passed, _: self.end(passed[0]) + 0.1 * passed[1], [self.leave])
        return [ModelPiece(lambda _, inputs: begin(inputs), [self.enter, self]), *blocks, last]

    def forward(self, x):
        value = None
        for piece in self.stages():
            value = piece.call(value, (x,))
        return value


class Dropped(Staged):
    """Drops before, within and behind its blocks."""

    widths = (DIM, 2 * DIM)

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.down = nn.Sequential(nn.Dropout(0.3), layer.down)

    def begin(self, x):
        return nn.functional.dropout(super().begin(x), 0.2, self.training)

    def end(self, x):
        return super().end(nn.functional.dropout(x, 0.2, self.training))


class BareDropped(Dropped):
    """In the bare loop: seeds for each step, micro batch and block, by hooks of its own.

    Six micro batches in a step, one process with data. Draws before the first block begin with the seed of the step.
    """

    def __init__(self):
        super().__init__()
        self.num_calls = 0
        for number, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *_, place=2 * number + 1: self.seed(place))
            layer.register_forward_hook(lambda *_, place=2 * number + 2: self.seed(place))

    def seed(self, place):
        step, micro = divmod(self.num_calls, 6)
        digest = hashlib.sha256(f"3/{step}/0".encode()).digest()
        torch.manual_seed(((int.from_bytes(digest[:8], "little") >> 1) + (micro << 20) + place) % 2**STEP_SEED_BITS)

    def forward(self, x):
        self.seed(0)
        answer = super().forward(x)
        self.num_calls += 1
        return answer


class FrozenStart(Staged):
    """All that the first of two stages has is frozen, and a part of what the second one has."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.layers[2].requires_grad_(True)


class FrozenEnd(Staged):
    """All that the last stage has is frozen."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.enter.requires_grad_(True)
        self.layers[0].up.requires_grad_(True)


class LeavesOut(Staged):
    """A parameter belongs to no piece."""

    def stages(self):
        return [ModelPiece(piece.call, [m for m in piece.modules if m is not self]) for piece in super().stages()]


class OtherPieces(Staged):
    """Its pieces are not its forward."""

    def forward(self, x):
        return 1.5 * super().forward(x)


class NoPieces(Staged):
    """Its parts are modules, and no pieces."""

    def stages(self):
        return [self.enter, *self.layers, self.leave]


class NamedParts(Staged):
    """It names modules instead of giving them."""

    def stages(self):
        return [replace(piece, modules=["enter"]) for piece in super().stages()]


class Untensored(Staged):
    """Between its pieces travels a dictionary."""

    def stages(self):
        first, *rest = super().stages()
        wrapped = ModelPiece(lambda value, inputs: {"hidden": first.call(value, inputs)}, first.modules)
        return [wrapped, *(ModelPiece(lambda v, i, p=p: p.call(v["hidden"], i), p.modules) for p in rest)]


class Counting(Staged):
    """A buffer changes in each forward, alike on all processes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_seen", torch.zeros(()))

    def begin(self, x):
        self.num_seen += 1
        return super().begin(x)


class NormedStages(Staged):
    def __init__(self):
        super().__init__()
        self.leave = nn.Sequential(nn.BatchNorm1d(DIM), self.leave)


class Tallying(Staged):
    """Each block counts for itself, and the counts of a step change the gains of all blocks."""

    buffer_reductions = {"tallies": "sum"}  # noqa: RUF012 - as the protocol has it

    def __init__(self):
        super().__init__()
        self.register_buffer("tallies", torch.zeros(len(self.widths), dtype=torch.int64))
        self.register_buffer("gains", torch.ones(len(self.widths)))

    def run(self, number, hidden):
        change = self.layers[number](hidden) - hidden
        if self.training:
            self.tallies[number] += (change > 0).sum()
        return hidden + self.gains[number] * change

    def stages(self):
        first, *_, last = super().stages()
        numbers = range(len(self.widths))
        blocks = [ModelPiece(lambda hidden, _, n=n: self.run(n, hidden), [self.layers[n]]) for n in numbers]
        return [first, *blocks, last]

    def forward(self, x):
        value = None
        for piece in self.stages():
            value = piece.call(value, (x,))
        return value

    def after_step(self):
        tallies = self.tallies.double()
        self.gains += 0.05 * torch.sign(tallies.mean() - tallies)
        self.tallies.zero_()


class TalliesInForward(Tallying):
    """It counts where no stage does."""

    def run(self, number, hidden):
        return self.layers[number](hidden)

    def forward(self, x):
        self.tallies += len(x)
        return super().forward(x)


class TalliesOfInputs(TalliesInForward):
    """It counts once for each stage."""

    def stage_inputs(self, x):
        self.tallies += len(x)
        return (x,)

    def forward(self, x):
        self.tallies += len(x)
        return Tallying.forward(self, x)


class LargestTallies(Tallying):
    buffer_reductions = {"tallies": "max"}  # noqa: RUF012


class Stepping(Staged):
    """Clamps its parameters after each step."""

    def after_step(self):
        for parameter in self.parameters():
            parameter.clamp_(-2, 2)


class TiedBlockEnds(Staged):
    """The first and the last block have a bias in common, by two names."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(DIM, DIM)
        self.other.bias = self.enter.bias

    def end(self, x):
        return super().end(self.other(x))

    def stages(self):
        *pieces, last = super().stages()
        return [*pieces, ModelPiece(last.call, [self.leave, self.other])]


STAGED, PAIRS, TIED_ENDS = map(case_of, (Staged, Pairs, TiedBlockEnds))
FROZEN_START, FROZEN_END, NORMED = map(case_of, (FrozenStart, FrozenEnd, NormedStages))
LEAVES_OUT, OTHER_PIECES, COUNTING, STEPPING = map(case_of, (LeavesOut, OtherPieces, Counting, Stepping))
NO_PIECES, NAMED_PARTS, UNTENSORED = map(case_of, (NoPieces, NamedParts, Untensored))
TALLYING, IN_FORWARD, OF_INPUTS, LARGEST = map(case_of, (Tallying, TalliesInForward, TalliesOfInputs, LargestTallies))
DROPPED = replace(case_of(Dropped), network=BareDropped)
EIGHT = oracle.Case("batches of eight", ("train.global_batch_size=8",), batch=8)
FOUR_LAYERS = oracle.Case("four layers", ("model.num_layers=4",), lambda: oracle.Llama(layers=4))


# -- defects -----------------------------------------------------------------------------------------------------------


def wrong_micro_batch():
    """The last stage computes the loss of another micro batch than it was sent."""

    def forward(module, *received, before=stage_modules.StageModule.forward):
        number = module.number
        if module._is_last and len(module.work) > 1:
            module.number = (number + 1) % len(module.work)
        try:
            return before(module, *received)
        finally:
            module.number = number

    return patched(stage_modules.StageModule, "forward", forward)


def received_in_bf16():
    """Stages round what they are sent, an auxiliary loss with it."""

    def forward(module, *received, before=stage_modules.StageModule.forward):
        return before(module, *(tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in received))

    return patched(stage_modules.StageModule, "forward", forward)


def tied_gradient_not_summed():
    """Each of two stages updates their parameter by its own gradient."""
    return patched(stage_modules.SharedParameters, "sum_gradients", lambda shared: None)


def tied_gradient_counted_twice():
    """The sum over two stages is taken two times."""

    def sum_twice(shared, before=stage_modules.SharedParameters.sum_gradients):
        before(shared)
        before(shared)

    return patched(stage_modules.SharedParameters, "sum_gradients", sum_twice)


def tied_gradient_in_the_norm_twice():
    return patched(stage_modules.SharedParameters, "list_copies", lambda shared: [])


def norm_of_one_stage():
    """The norm leaves out the axis `pipeline`."""
    return patched(Mesh, "norm_group", lambda mesh: None)


def buffers_of_one_stage():
    """Only the first stage adds to buffers that are sums."""
    return patched(Shape, "counts_buffers", Shape.counts_loss)


def buffers_of_the_shapes_pass():
    """What torch computes for the shapes alone is counted, too."""
    return patched(pipelined.Stage, "_compute_outputs", PipelineStage._compute_outputs)


def rows_of_weight_0_counted():
    """No stage is told which rows count."""
    return patched(stage_modules, "give_row_weights", lambda model, weights: None)


def draws_in_order():
    """Random numbers come from one stream for the whole step."""
    return patched(draws.PlacedDraws, "_seed", lambda placed, place: None)
