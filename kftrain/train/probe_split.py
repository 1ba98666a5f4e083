"""Compares a model whose matrices are split, or whose sequences are cut, with the whole one.

Outputs, loss and gradients must be the same.

The weights are drawn for this test alone, none zero and no two alike: behind a projection that begins at zero no
gradient would show a mistake. The model is in training mode, but its dropouts drop nothing, since the masks of parts
are not the mask of the whole. Instead it is compared who draws: each process for itself between a column and its row,
where it has some of the features, and all processes alike everywhere else. Tensors are compared by a few products with
random vectors, so that no process keeps a gradient, or is sent another's.

Every process of the axis computes the whole model, too: the first one with the same weights, all others with weights
that are changed by a millionth. What these numbers differ by shows how far roundings alone move each of them: further
in a deep model, and a gradient that is zero but for roundings by all of it. A split model that differs by much more is
refused.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kftrain.core.progress import to_log
from kftrain.data.loader import MicroBatch
from kftrain.errors import ConfigError
from kftrain.parallel.context import AXIS as CONTEXT
from kftrain.parallel.context import CutSequences
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.initialize import places_of, stored_parameter
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.sequences import WHOLE_SEQUENCES, SequenceCut
from kftrain.parallel.sharded import index_of
from kftrain.parallel.tensor import AXIS as TENSOR
from kftrain.parallel.tensor import CopiedParameters, SplitTensors
from kftrain.parallel.tensor_plan import SplitModule, read_plan
from kftrain.tasks.base import TrainingTask
from kftrain.train import probe
from kftrain.train.probe import Lender, lend_attributes
from kftrain.train.step import compute_loss_sum, receive_tensors

CHANGE = 2.0**-20
"""Relative change of each weight in all runs of the whole model but the first: sixteen times what fp32 resolves."""

MAX_RATIO = 100.0
"""Largest accepted ratio of what splitting changes to what `CHANGE` does. Of gradients that are zero but for roundings
it was seen to be five."""

MAX_DIFFERENCE = 1e-5
"""Difference, relative to a tensor's products, that is accepted on top, however little `CHANGE` has moved them."""

NUM_PRODUCTS = 8
"""Number of products of each tensor: two tensors that differ do not agree in all of them by chance."""

Label = tuple[str, str, int]
"""Name of a module or a parameter; `output`, `loss`, `gradient`, or `mask` (who draws a dropout's mask: each process
for itself, or all alike); and a number where there are several."""

FIX_OF_SPLITS = (
    "see tensor_plan(): name the module as sequence, or a dropout as random, where it is given a part of "
    "the places only, and let nothing between the matrices depend on other places than its own; or set it to 1"
)
FIX_OF_CUTS = (
    "see context_plan(): compute positions before the cut, and let nothing behind it but the attention depend on other "
    "places than its own; or set it to 1"
)

Shares = Callable[[str, str], float | None]
"""Name and kind of a label -> factor of each process's numbers in the sum over all; None where each has its own."""

Record = dict[Label, list[list[float]]]
"""Label -> products, in the order of computation: of a split model this process's, in a list of one; of a whole model a
list for the part of each process."""


def require_same_as_whole(
    model: nn.Module,
    task: TrainingTask,
    micro: MicroBatch,
    mesh: Mesh,
    splitting: SplitTensors | CutSequences,
    names: Sequence[str],
    units: Sequence[str],
    seed: int,
) -> None:
    """Refuse a plan under which the spread model computes other numbers than the whole one. Collective.

    Args:
        model: The whole model; it is split for the comparison only.
        task: Computes the loss.
        micro: Rows to try, of which the first few are taken; the same on all processes of the axis.
        mesh: Layout with the axis of the transform.
        splitting: The transform that splits the model's matrices, or cuts its sequences.
        names: Names of the model's blocks.
        units: Names of the blocks that borrow their weights for the time of each call (`probe.Lender`).
        seed: Seed of the run.

    Raises ConfigError on all processes where the model's output, the loss, a gradient or the drawer of a dropout's mask
    differs. The output of an inner module does not count by itself; but the error names what differs first, in the
    order of execution.
    """
    is_cut = isinstance(splitting, CutSequences)
    size, device = mesh.shape.context if is_cut else mesh.shape.tensor, mesh.world.device
    group = mesh.group([CONTEXT if is_cut else TENSOR])
    plan = {} if isinstance(splitting, CutSequences) else read_plan(model, size, splitting.sequence_parallel)
    own_shapes: dict[Label, torch.Size] = {}

    def compute(change: int, num_parts: int) -> Record:
        seen, lent = _Recording(own_shapes, num_parts, mesh.sequence_cut if is_cut else None), list[nn.Parameter]()
        cut = mesh.sequence_cut if is_cut and num_parts == 1 else WHOLE_SEQUENCES

        def watch(name: str, parameter: nn.Parameter) -> None:
            if parameter.requires_grad:
                lent.append(parameter)
                parameter.register_hook(functools.partial(seen.take_gradient, name))  # type: ignore[no-untyped-call]

        # Made anew for each pass: for the split model the parameters are parts by now, and so are the lent weights.
        lender = Lender(cast(Any, _Weights(model, change)), units, watch)
        with probe.lend_copies(model, device, torch.float32, lender), seen:
            for name, module in model.named_modules():
                module.register_forward_pre_hook(functools.partial(seen.begin, name, plan.get(name)))
                if name not in plan or plan[name].num_matrices == 1:  # a part of several matrices is no slice of them
                    module.register_forward_hook(functools.partial(seen.take_output, name))  # as lent as all else
            with probe.isolate((seed, mesh.data_rank), device):  # by the data rank: alike on all processes of the axis
                loss = compute_loss_sum(
                    model, task, receive_tensors(task, probe.take_rows(micro, slice(probe.ROWS)), device), cut
                )
            seen.take("", "loss", loss)
            torch.autograd.grad(loss, lent, allow_unused=True)  # the hooks see the gradients, and nothing keeps them
        return seen.record

    # Splitting replaces parameters and forwards, which are attributes of the modules: at the end of the block all are
    # back. The split pass comes first, since the whole one cuts its tensors by the shapes that it has noted.
    with lend_attributes(model):
        distributed = Distributed(model, mesh)
        splitting.apply(distributed, names)
        split = compute(0, 1)
    whole = compute(dist.get_rank(group), size)
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, (split, whole), group=group)
    shares = _find_shares(distributed, size, is_cut)
    mesh.world.agree(lambda: _compare([cut for cut, _ in everyones], [whole for _, whole in everyones], shares, is_cut))


def _find_shares(distributed: Distributed, size: int, is_cut: bool) -> Shares:
    """Return what each process's numbers count in the sum over all, or None where each has its own: by their label."""
    if is_cut:  # loss and gradients are sums over places
        return lambda name, kind: None if kind == "output" else 1.0
    (copied,) = (work for work in distributed.after_backward if isinstance(work, CopiedParameters))
    return lambda name, kind: copied.share_of(name) if kind == "gradient" else None


class _Recording(TorchFunctionMode):
    """Records the numbers of a pass: of a split model its own, of a whole one the part of each process.

    Within it dropouts return what they are given, and attention drops nothing.
    """

    def __init__(self, own_shapes: dict[Label, torch.Size], num_parts: int, cut: SequenceCut | None) -> None:
        """Record a pass: of a split model where `num_parts` is 1, else of a whole one, cut into so many parts.

        `own_shapes`: shapes of this process's parts; the split model's pass, the first one, fills it. `cut`: how
        sequences are cut; None where matrices are split.
        """
        super().__init__()
        self.record: Record = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._own_shapes = own_shapes
        self._num_parts = num_parts
        self._cut = cut
        self._module = ""
        self._draws_apart = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
            if keywords["training"] and keywords["p"]:
                self.take(self._module, "mask", args[0])
            return args[0]
        return function(*args, **{key: 0.0 if key == "dropout_p" else value for key, value in keywords.items()})

    def begin(self, name: str, part: SplitModule | None, *_: Any) -> None:
        """Note that a module's forward begins. `part`: the plan's entry for it."""
        self._module = name
        # From a column on a process has features of its own, and draws for itself; a row brings all together again.
        if part is not None and part.kind in ("column", "row"):
            self._draws_apart = part.kind == "column"

    def take_output(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.take(name, "output", leaf)

    def take_gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Record the gradient of a parameter; return zeros that take no memory, to be kept in its place."""
        self.take(name, "gradient", gradient)
        # Autograd keeps what it is given back to the end of the pass: a zero without memory instead of the gradient.
        return gradient.new_zeros(()).expand(gradient.shape)

    def take(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        """Record the products of a tensor, or of its parts where this is the whole model's pass."""
        label = (name, kind, self._counts[name, kind])
        self._counts[name, kind] += 1
        own_shape = self._own_shapes.setdefault(label, tensor.shape)
        if kind == "mask":
            # Of the split model: whether each process draws a mask of its own. Of the whole one: whether it must, since
            # what it drops of is a part on each process.
            tensor = torch.tensor(self._draws_apart if self._num_parts == 1 else tensor.shape != own_shape)
            own_shape = tensor.shape
        parts = _cut_parts(tensor.detach().float(), own_shape, self._num_parts, self._cut)
        products = [_make_products(part) for part in dict.fromkeys(parts)]  # a copy that all have is one object: once
        self.record[label] = products * (len(parts) // max(len(products), 1))


def _cut_parts(
    whole: torch.Tensor, shape: torch.Size, count: int, cut: SequenceCut | None = None
) -> Sequence[torch.Tensor]:
    """Cut a tensor into the parts of `count` processes; return none where a part of `shape` is no slice along a dim.

    Where a part has the shape of the whole, each process has all of it.
    """
    odd = [dim for dim, length in enumerate(whole.shape) if shape[dim : dim + 1] != (length,)]
    if not odd or count == 1:
        return [whole] * count
    fits_cut = cut is not None and shape[odd[0] : odd[0] + 1] == (whole.shape[odd[0]] // count,)
    parts = cut.view_parts(whole, odd[0]).unbind() if cut and fits_cut else whole.chunk(count, odd[0])
    return parts if len(odd) == 1 and len(shape) == whole.dim() and len(parts) == count else []


def _make_products(tensor: torch.Tensor) -> Any:
    """View the tensor as a matrix M; return u M v for NUM_PRODUCTS pairs of random vectors u and v."""
    # The seed is the same everywhere: products with other vectors could not be compared.
    matrix = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(NUM_PRODUCTS, length, generator=draw).to(tensor.device) for length in matrix.shape)
    return ((left @ matrix) * right).double().sum(1).tolist()


class _Weights:
    """Draws weights of which none is zero and no two are alike; for a split model this process's part of each."""

    def __init__(self, model: nn.Module, change: int) -> None:
        """Remember how the parameters are cut. `change`: 0 for none, or the seed of a relative change by `CHANGE`."""
        self.places = places_of(model)
        self._change = change
        self._parameters = {name: stored_parameter(slots[0]) for name, slots in self.places.items()}

    def whole(self, name: str, device: torch.device) -> torch.Tensor:
        """Draw a weight: matrices keep the size of what passes through them; gains and biases are about one.

        Return this process's part of it.
        """
        # Seeded by the name: each process draws the same whole weight for the split model and for the whole one.
        shape = self._parameters[name].shape
        draw = torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little"))
        if len(shape) < 2:
            value = torch.rand(shape, generator=draw, device=device) + 0.5
        else:
            value = torch.randn(shape, generator=draw, device=device) * math.sqrt(shape[0] / shape.numel())
        if self._change:
            draw.manual_seed(self._change)
            value *= 1 + CHANGE * torch.randn(shape, generator=draw, device=device)
        part = value[index_of(self._parameters[name])]
        return value if part.shape == value.shape else part.clone()


def _compare(split: list[Record], whole: list[Record], shares: Shares, is_cut: bool) -> None:
    """Compare the records of all processes of the axis, in order of rank. Raises ConfigError.

    Warns only where the whole model's loss is not finite: then there is nothing to compare.
    """
    # whole[0] is the reference; the others computed the same with changed weights, and show how far roundings go.
    size, first, nothing = len(whole), whole[0], [[0.0] * NUM_PRODUCTS] * len(whole)
    if not all(map(math.isfinite, first["", "loss", 0][0])):
        to_log("warning: how the matrices are split could not be compared: the loss of random weights is not finite")
        return
    odd: list[Label] = []
    for label, references in first.items():
        numbers = [record.get(label, nothing)[0] for record in split]
        share = shares(*label[:2])
        if share is not None:
            # What is summed at the end of a step only, or with the loss, becomes whole there. Products are linear:
            # those of the sum are the sum of the processes' products.
            numbers = [[share * sum(values) for values in zip(*numbers, strict=True)]] * size
        for rank, reference in enumerate(references if math.isfinite(sum(map(sum, references))) else []):
            moved = max(math.dist(reference, record.get(label, nothing)[rank]) for record in whole[1:])
            limit = MAX_RATIO * moved + MAX_DIFFERENCE * math.hypot(*reference)
            odd += [] if math.dist(numbers[rank], reference) <= limit else [label]
    if any(name == "" or kind != "output" for name, kind, _ in odd):
        raise ConfigError(
            f"with its {'sequences cut' if is_cut else 'matrices split'} the model computes another {odd[0][1]} "
            "than as a whole",
            where=f"model {odd[0][0]}".rstrip(),
            value=f"parallel.{CONTEXT if is_cut else TENSOR}: {size}",
            fix=FIX_OF_CUTS if is_cut else FIX_OF_SPLITS,
        )
