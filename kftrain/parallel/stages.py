"""Cuts a model's pieces into stages of a pipeline, and says what a schedule asks for and leaves idle. Without torch.

A pipeline of p processes has p stages, or with the schedules that fold or interleave 2p. A stage is some pieces that
follow each other. Every process computes all micro batches of a step, m of them, with its stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kftrain.errors import ConfigError

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev"]


@dataclass(frozen=True)
class ScheduleFacts:
    """The facts about one of torch's schedules."""

    torch_name: str
    stages_per_process: int = 1
    is_folded: bool = False
    """True where a process has stages i and 2p - 1 - i (a V); else i, i + p."""
    splits_backward: bool = False
    """True where the gradients of weights are computed apart from those of inputs, later."""


SCHEDULES: dict[str, ScheduleFacts] = {
    "gpipe": ScheduleFacts("GPipe"),
    "1f1b": ScheduleFacts("1F1B"),
    "interleaved": ScheduleFacts("Interleaved1F1B", 2),
    "interleaved_zero_bubble": ScheduleFacts("InterleavedZeroBubble", 2, splits_backward=True),
    "zbv": ScheduleFacts("ZBVZeroBubble", 2, is_folded=True, splits_backward=True),
    "dualpipev": ScheduleFacts("DualPipeV", 2, is_folded=True, splits_backward=True),
}
"""Name -> its facts: Huang et al. 2019 (arXiv:1811.06965), Narayanan et al. 2021 (arXiv:2104.04473), Qi et al. 2024
(arXiv:2401.10241, arXiv:2405.15362), DeepSeek-V3 (arXiv:2412.19437)."""


def list_stages(name: str, place: int, num_processes: int) -> list[int]:
    """List the numbers of the stages of the process at a place of the axis `pipeline`."""
    schedule = SCHEDULES[name]
    if schedule.is_folded:
        return [place, 2 * num_processes - 1 - place]
    return [place + turn * num_processes for turn in range(schedule.stages_per_process)]


def find_process(name: str, stage: int, num_processes: int) -> int:
    """Return the place on the axis `pipeline` of the process that has a stage."""
    return next(place for place in range(num_processes) if stage in list_stages(name, place, num_processes))


def count_stages(name: str, num_processes: int) -> int:
    """Return the number of stages of all processes."""
    return SCHEDULES[name].stages_per_process * num_processes


def require_enough_pieces(count: int, num_stages: int) -> None:
    """Raises ConfigError where a model has fewer pieces than stages."""
    if count < num_stages > 1:
        what, fix = f"the model has {count} pieces, too few for {num_stages} stages", f"use at most {count} stages"
        raise ConfigError(what, where="parallel.pipeline", value=num_stages, fix=f"{fix}, or a model with more blocks")


def require_micro_batches(name: str, num_micro_batches: int, num_processes: int) -> None:
    """Raises ConfigError, which names numbers that would do, where a schedule cannot have so many micro batches."""
    if is_schedulable(name, num_micro_batches, num_processes):
        return
    more = itertools.count(num_micro_batches + 1)
    numbers = itertools.islice((str(m) for m in more if is_schedulable(name, m, num_processes)), 2)
    least = 2 * num_processes if SCHEDULES[name].is_folded else num_processes
    what = f"parallel.schedule {name} over {num_processes} processes needs at least {least} micro batches in a step"
    what += "" if num_micro_batches < least else ", and a number that has equal rounds"
    fix = f"make it smaller, so that there are {', '.join(numbers)} or more"
    raise ConfigError(what, where="train.micro_batch_size", value=f"{num_micro_batches} micro batches", fix=fix)


def is_schedulable(name: str, num_micro_batches: int, num_processes: int) -> bool:
    """Tell whether a schedule can have so many micro batches, as torch's classes and a full pipeline ask for."""
    if num_micro_batches < (2 * num_processes if SCHEDULES[name].is_folded else num_processes):
        return False
    if not name.startswith("interleaved"):
        return True
    # In rounds of equal size: torch's classes refuse a remainder.
    return num_micro_batches % (num_micro_batches // num_processes) == 0


def estimate_bubble(name: str, num_micro_batches: int, num_processes: int) -> float:
    """Return the share of a step that a process waits for others, if stages cost the same.

    A backward pass counts as two forward passes, one for inputs and one for weights; sending costs nothing.
    """
    m, p = num_micro_batches, num_processes
    if name in ("gpipe", "1f1b"):
        return (p - 1) / (m + p - 1)
    if name == "interleaved":
        return (p - 1) / (2 * m + p - 1)
    return (p - 1) / (6 * m + p - 1)


def cut_pieces(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut pieces that follow each other into stages, so that the largest stage costs as little as possible.

    Of several such cuts it takes the one whose costs differ least (the least sum of squares). `costs`: of each piece.
    Raises ConfigError where there are fewer pieces than stages.
    """
    require_enough_pieces(len(costs), num_stages)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    largest = _cut_with(sums, num_stages, lambda before, cost: max(before, cost))[0]
    limit = largest * (1 + 1e-12)  # sums of other orders are rounded otherwise
    edges = _cut_with(sums, num_stages, lambda before, cost: before + cost**2 if cost <= limit else float("inf"))[1]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def _cut_with(sums: Sequence[float], num_stages: int, join: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """Return the least value of a cut, and its edges. `join`: value so far and cost of a stage -> value with it."""
    # Pieces before a stop, in so many stages -> the best way to cut them: each stage adds one edge to those of before.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(num_stages):
        stops = range(stage + 1, len(sums) - (num_stages - stage - 1))
        best = {
            stop: min(
                (join(value, sums[stop] - sums[start]), [*edges, stop])
                for start, (value, edges) in best.items()
                if start < stop
            )
            for stop in stops
        }
    return best[len(sums) - 1]
