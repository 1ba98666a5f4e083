"""Our own optimizers: each computes with this process's parts of the parameters, and skips a step on the device.

torch's classes dispatch distributed tensors one by one, and find out anew in each step which tensors belong together: a
tenth of the step of a small model. Some of their kernels do not take distributed tensors at all. Ours call the kernels
on local tensors. Nothing but the state is kept between steps: a parameter may get other memory.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kftrain.parallel.sharded import ALONE, Team, apply_to_whole, index_of, list_cut_matrices, local, sum_over_parts

Group = dict[str, Any]
"""A parameter group of torch: `params`, and the settings that hold for them."""


class SkippingOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer whose step changes nothing where `found_inf` is 1, without the host's knowing.

    So every operation runs in any case, and each change is multiplied by `count_step`, 1 or 0. Gradients that are no
    numbers must be masked before that: 0 times them is no number either.

    The state is there from the beginning, so that a checkpoint has it of each parameter, even of one that has had no
    gradient yet, such as an expert that no token has reached.
    """

    found_inf: torch.Tensor | None = None
    """Scalar: 1 where the gradients are not finite, else 0; None where they are known to be finite."""
    position: int = 0
    """Number of samples before this step, which tells it from all others."""

    def __init__(self, groups: list[Group], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.make_state(parameter)

    @abc.abstractmethod
    def make_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter before its first step, by torch's names."""

    @abc.abstractmethod
    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Update parameters that have a gradient; `gradients`: their local parts, which may be changed."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all groups, as torch calls it; `closure` is not taken. Collective."""
        assert closure is None
        self.advance()

    def advance(self) -> None:
        """Update all groups, without a profiler's mark. Gradients must not be recorded. Collective."""
        # A gradient is there on all processes or on none (parallel/gradients.py), so all exchange for the same ones.
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if used:
                self.update(group, used, [local(parameter.grad) for parameter in used])

    def count_step(self, device: torch.device) -> torch.Tensor:
        """Return 1 where this step counts, 0 where it is skipped: a scalar on the device."""
        return torch.ones((), device=device) if self.found_inf is None else torch.rsub(self.found_inf.to(device), 1.0)

    def local_states(self, parameters: list[torch.Tensor], *names: str) -> list[list[torch.Tensor]]:
        """Return this process's parts of the parameters' states, a list for each of these names."""
        states = [self.state[parameter] for parameter in parameters]
        return [[local(state[name]) for state in states] for name in names]


def make_zero(parameter: torch.Tensor) -> torch.Tensor:
    """Make a scalar 0, fp32, on a parameter's device: a count of its steps, for example."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device)


class Sgd(SkippingOptimizer):
    """SGD with momentum, as `torch.optim.SGD` (Sutskever et al. 2013), by its fused kernel, which can skip a step.

    Weight decay is added to the gradient.
    """

    def __init__(self, groups: list[Group], learning_rate: float, momentum: float, nesterov: bool) -> None:
        super().__init__(groups, {"lr": learning_rate, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0})

    def make_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Start with a count of 0, and a momentum of 0 where there is one."""
        momentum = {"momentum_buffer": torch.zeros_like(parameter)} if self.defaults["momentum"] else {}
        return {"step": make_zero(parameter), **momentum}

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Update all parameters of a group by one kernel."""
        (steps,) = self.local_states(parameters, "step")
        torch._fused_sgd_(
            [local(parameter) for parameter in parameters],
            gradients,
            self.local_states(parameters, "momentum_buffer")[0] if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,  # the first momentum is the gradient, as from a momentum of 0
            found_inf=None if self.found_inf is None else self.found_inf.to(gradients[0].device),
        )
        torch._foreach_add_(steps, [self.count_step(gradients[0].device)] * len(parameters))


class AdamW(SkippingOptimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), by torch's fused kernel; its state has torch's names."""

    def __init__(self, groups: list[Group], learning_rate: float, betas: tuple[float, float], epsilon: float) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "eps": epsilon, "weight_decay": 0.0})

    def make_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Start with a count of 0 and two moments of 0."""
        return {
            "step": make_zero(parameter),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Update all parameters of a group by one kernel."""
        weights = [local(parameter) for parameter in parameters]
        self.compute(group, weights, gradients, *self.local_states(parameters, "exp_avg", "exp_avg_sq", "step"))

    def compute(
        self,
        group: Group,
        weights: list[torch.Tensor],
        gradients: list[torch.Tensor],
        means: list[torch.Tensor],
        squares: list[torch.Tensor],
        counts: list[torch.Tensor],
    ) -> None:
        """Change weights, moments and counts of steps in place; each list has a tensor for each parameter."""
        device = gradients[0].device
        # Counted before, since the kernel divides by 1 less a power of the betas, which is 0 at a count of 0. Where the
        # step is skipped the count stays, and the kernel does nothing.
        torch._foreach_add_(counts, [self.count_step(device)] * len(counts))
        torch._fused_adamw_(
            weights,
            gradients,
            means,
            squares,
            [],
            counts,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=None if self.found_inf is None else self.found_inf.to(device),
        )


class Lamb(AdamW):
    """LAMB (You et al. 2019, arXiv:1904.00962): AdamW's direction, as long for each parameter as the parameter itself.

    As in the paper: moments with bias correction, decay within the direction, no bounds of the norms. The norms go over
    the parts of a parameter: one all-reduce in a step for each parameter group, and for each axis of the mesh that cuts
    its parameters.
    """

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Make the directions, then their norms and those of the weights, then change the weights."""
        # All directions first, in the gradients' memory: then one exchange brings the norms of all parameters.
        counts = self.count_step(gradients[0].device)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._make_direction(group, parameter, gradient.masked_fill_(counts == 0, 0.0), counts)
        weights = [local(parameter) for parameter in parameters]
        squares = [
            torch.stack([part.square().sum(), d.square().sum()]) for part, d in zip(weights, gradients, strict=True)
        ]
        for part, direction, sums in zip(weights, gradients, sum_over_parts(squares, parameters), strict=True):
            size, length = sums.sqrt()
            ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)  # or weights of 0 would stay 0
            part.sub_(direction.mul_(ratio * group["lr"] * counts))

    def _make_direction(
        self, group: Group, parameter: torch.Tensor, gradient: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Move the moments, and make the gradient the direction. A skipped step moves them by 0 times a masked one."""
        (beta1, beta2), state = group["betas"], self.state[parameter]
        mean, variance = local(state["exp_avg"]), local(state["exp_avg_sq"])
        step = state["step"].add_(counts).clamp(min=1)  # 0: the first step is skipped
        mean.lerp_(gradient, (1 - beta1) * counts)
        variance.lerp_(gradient.square(), (1 - beta2) * counts)
        scale = (variance / (1 - beta2**step)).sqrt_().add_(group["eps"])
        gradient.copy_(mean / (1 - beta1**step) / scale + group["weight_decay"] * local(parameter))


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic: as steep at 0 as can be; it brings singular values to about 0.7 … 1.2."""

NUM_ITERATIONS = 5
EPSILON = 1e-7

Scale = Literal["match_rms_adamw", "original"]
MATCHING: Scale = "match_rms_adamw"


class Muon(SkippingOptimizer):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose matrices are made orthogonal.

    The numbers are those of `torch.optim.Muon`, whose iteration is always in bf16; here it is in the format of the
    computation, since in bf16 the last bit of a gradient, which no two layouts share, tips roundings. And torch's
    leaves it to distributed tensors, which round otherwise; here a matrix is brought together on one process. Of a
    stack, `[experts, rows, columns]`, each matrix is taken by itself.
    """

    def __init__(
        self,
        groups: list[Group],
        learning_rate: float,
        momentum: float,
        nesterov: bool,
        scale: Scale,
        compute: torch.dtype,
        replicas: Team = ALONE,
    ) -> None:
        """Take matrices. `compute`: the format of the iteration; `replicas`: processes with the same plain tensors."""
        defaults = {"lr": learning_rate, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0}
        super().__init__(groups, {**defaults, "scale": scale})
        self._compute = compute
        self._replicas = replicas

    def make_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Start with a count of 0 and a momentum of 0."""
        assert parameter.dim() in (2, 3), parameter.shape
        return {"step": make_zero(parameter), "momentum_buffer": torch.zeros_like(parameter)}

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Move momentum and weights part by part; make whole matrices orthogonal, one process each."""
        counts, momentum = self.count_step(gradients[0].device), group["momentum"]
        steps, buffers = self.local_states(parameters, "step", "momentum_buffer")
        torch._foreach_add_(steps, [counts] * len(parameters))
        for gradient, buffer in zip(gradients, buffers, strict=True):
            # In a skipped step the momentum stands in for the gradient: moved towards itself it stays as it is.
            gradient.copy_(torch.where(counts > 0, gradient, buffer))
            buffer.lerp_(gradient, 1 - momentum)
            if group["nesterov"]:
                gradient.lerp_(buffer, momentum)
            else:
                gradient.copy_(buffer)
        # Cast before the exchange: it moves all matrices there and back, so half as much in bf16.
        casts = [gradient.to(self._compute) for gradient in gradients]
        for parameter, direction in zip(parameters, self._make_directions(casts, parameters), strict=True):
            weights, rate = local(parameter), group["lr"] * _choose_rate_factor(group["scale"], parameter.shape)
            weights.mul_(1 - group["lr"] * group["weight_decay"] * counts)
            weights.sub_(direction.float().mul_(rate * counts))

    def _make_directions(self, casts: list[torch.Tensor], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Make matrices orthogonal, of a stack each by itself; return this process's parts. Collective."""
        cuts = [list_cut_matrices(parameter, cast) for parameter, cast in zip(parameters, casts, strict=True)]
        parts, like = ([pair[place] for pairs in cuts for pair in pairs] for place in (0, 1))
        done = iter(apply_to_whole(parts, like, orthogonalize, self._replicas))
        directions = []
        for pairs, cast in zip(cuts, casts, strict=True):
            results = [next(done) for _ in pairs]
            if not results:  # a stack whose matrices are whole is done where it is, all of them in one product
                directions.append(orthogonalize(cast))
            else:
                directions.append(results[0] if cast.dim() == 2 else torch.stack(results))
        return directions


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return about the nearest matrix with orthonormal rows or columns, by Newton-Schulz, in the matrix's format.

    Of a stack `[n, rows, columns]` each matrix by itself.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(-2) > matrix.size(-1)
    wide = matrix.mT if is_tall else matrix  # the products with its transpose are then the smaller ones
    norms = wide.norm(dim=(-2, -1), keepdim=True)
    wide = wide / norms.clamp(min=EPSILON)  # no singular value is above 1: else the iteration diverges
    multiply_and_add = torch.addmm if wide.dim() == 2 else torch.baddbmm
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.mT
        wide = multiply_and_add(wide, multiply_and_add(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


@functools.cache
def _choose_rate_factor(scale: Scale, shape: tuple[int, ...]) -> float:
    """Return the factor of the learning rate for a shape: the original one, or that of Liu et al. 2025.

    The latter makes updates of any shape as large as AdamW's (arXiv:2502.16982).
    """
    rows, columns = shape[-2:]
    return 0.2 * math.sqrt(max(rows, columns)) if scale == MATCHING else math.sqrt(max(1.0, rows / columns))


BETA2_DECAY = -0.8
"""Exponent of the step count: the share of a new square in the second moments is `step**BETA2_DECAY`."""

MIN_SCALE = 1e-3
"""Least size that a parameter counts with, so that one that begins at 0 moves."""

MIN_MOMENT = torch.finfo(torch.float32).eps
LARGEST_UPDATE = 1.0
"""Root mean square of an update above which it is scaled down."""


@dataclass
class _Part:
    """This process's part of one parameter, within one step."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    weights: torch.Tensor
    state: dict[str, torch.Tensor]
    index: tuple[slice, ...]

    @property
    def is_matrix(self) -> bool:
        return self.parameter.dim() > 1


class Adafactor(SkippingOptimizer):
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): second moments as a row and a column for each matrix.

    Weight decay is decoupled; the learning rate is the largest step relative to a parameter's size. The numbers are
    those of `torch.optim.Adafactor`, which fails on distributed tensors and reads numbers on the host. Rows and columns
    are kept whole on each process, they are short; the sums behind them go over the parts of a matrix: two all-reduces
    in a step for each parameter group, and for each axis of the mesh that cuts its parameters.
    """

    def __init__(self, groups: list[Group], learning_rate: float) -> None:
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0})
        self._indices = {member: index_of(member) for group in self.param_groups for member in group["params"]}

    def make_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Start with a count of 0 and second moments of 0: for a matrix one for each row and one for each column."""
        if parameter.dim() < 2:
            return {"step": make_zero(parameter), "variance": torch.zeros_like(parameter)}
        *stack, rows, columns = parameter.shape
        moments = {"row_var": (*stack, rows, 1), "col_var": (*stack, 1, columns)}
        return {
            "step": make_zero(parameter),
            **{name: torch.zeros(shape, device=parameter.device) for name, shape in moments.items()},
        }

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Sum over each parameter, then make its update, then measure the update, then change the weights."""
        # Each of the two sums is one exchange for all parameters. The second cannot join the first: the size of an
        # update is known only when the moments, which come of the first, are whole.
        counts = self.count_step(gradients[0].device)
        parts = [
            _Part(owner, gradient.masked_fill_(counts == 0, 0.0), local(owner), self.state[owner], self._indices[owner])
            for owner, gradient in zip(parameters, gradients, strict=True)
        ]
        sums = sum_over_parts([_sum_squares(part) for part in parts], parameters)
        rates = [_make_update(part, whole, group["lr"], counts) for part, whole in zip(parts, sums, strict=True)]
        squares = sum_over_parts([part.gradient.square().sum() for part in parts], parameters)
        for part, rate, square in zip(parts, rates, squares, strict=True):
            size = (square / part.parameter.numel()).sqrt()
            part.weights.mul_(1 - group["lr"] * group["weight_decay"] * counts)
            part.weights.sub_(part.gradient.mul_(counts * rate / (size / LARGEST_UPDATE).clamp(min=1.0)))
            part.state["step"].add_(counts)


def _sum_squares(part: _Part) -> torch.Tensor:
    """Sum this part's squares: of the weights, and for a matrix of the gradient along its rows and columns."""
    # Rows and columns of the whole matrix, with 0 where others have parts: so the sum over processes puts them
    # together, whichever way the matrix is cut.
    size = part.weights.square().sum().reshape(1)
    if not part.is_matrix:
        return size
    rows, columns = torch.zeros_like(part.state["row_var"]), torch.zeros_like(part.state["col_var"])
    squares = part.gradient.square()
    rows[part.index[:-1]] = squares.sum(-1, keepdim=True)
    columns[part.index[:-2]][..., part.index[-1]] = squares.sum(-2, keepdim=True)
    return torch.cat([size, rows.reshape(-1), columns.reshape(-1)])


def _make_update(part: _Part, sums: torch.Tensor, largest_rate: float, counts: torch.Tensor) -> torch.Tensor:
    """Move the second moments, make the gradient the update of rate 1, and return its rate."""
    step, state, gradient = part.state["step"] + 1, part.state, part.gradient
    moved = step**BETA2_DECAY * counts
    if part.is_matrix:
        rows, columns = state["row_var"], state["col_var"]
        size, by_row, by_column = torch.split(sums, [1, rows.numel(), columns.numel()])
        rows.lerp_(by_row.view_as(rows) / part.parameter.size(-1), moved)
        columns.lerp_(by_column.view_as(columns) / part.parameter.size(-2), moved)
        stack = part.index[:-2]
        mean = rows.mean(dim=-2, keepdim=True).clamp(min=MIN_MOMENT)[stack]
        # Of the whole rows and columns, which each process has, only those of its part: no larger product is made.
        moments = rows[part.index[:-1]] @ columns[stack][..., part.index[-1]] / mean
    else:
        size, variance = sums, local(state["variance"])
        moments = variance.lerp_(gradient.square(), moved)
    gradient.mul_(moments.clamp(min=MIN_MOMENT**2).rsqrt())
    scale = (size[0] / part.parameter.numel()).sqrt().clamp(min=MIN_SCALE)
    rate: torch.Tensor = scale * step.rsqrt().clamp(max=largest_rate)
    return rate
