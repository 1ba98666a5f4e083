"""Chooses a strategy and the sizes of `replicate`, `shard` and `tensor` by the bytes that they send. Pure, no torch.

Candidates are the layouts of the parity table (docs/parallelism.md) whose state fits into half of a device's memory.
Each axis sends its bytes (Rajbhandari et al. 2020, arXiv:1910.02054; along `tensor` Shoeybi et al. 2019,
arXiv:1909.08053) around rings in the order of the processes, so that one process of a group on a node sends to the next
node. An exchange takes as long as the slower of the two: what a process sends within its node, or what all groups of a
node send over the node's link. The least sum over the axes wins. Exchanges count as if nothing was computed meanwhile,
and latency does not count: the table compares layouts, and predicts no step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from kftrain.parallel.shape import Shape
from kftrain.parallel.strategies import (
    STATE_COPIES,
    STATE_SHARE,
    Exchange,
    Strategy,
    estimate_state_bytes,
    resolve_sharding,
)

GIGA = 1e9
MASTER_BYTES = 4
UNITS_GATHERED = 2
"""Blocks that `fsdp` has gathered at a time: the one that computes, and the next."""


@dataclass(frozen=True)
class Machines:
    """The machines of a job, and how fast they send. Rates are bytes per second, in one direction."""

    num_nodes: int
    processes_per_node: int
    device_bytes: float
    between_nodes_rate: float
    """Rate of all processes of a node together."""
    within_node_rate: float
    """Rate of one process."""


@dataclass(frozen=True)
class Work:
    """Sizes of a step, whatever its layout."""

    num_parameters: int
    num_layers: int
    num_features: int
    """Numbers that are exchanged along `tensor` for each place of a row, forward and again backward."""
    places_of_row: int
    batch_rows: int
    micro_batch_rows: int
    """Most rows of a micro batch; 0: the whole share of a process."""
    compute_bytes: int = 4
    reduce_bytes: int = 4
    tensor_sizes: tuple[int, ...] = (1,)
    """Sizes of the axis `tensor` that divide what it splits."""


@dataclass(frozen=True)
class Candidate:
    """A layout, what it keeps and sends, and why it was not taken."""

    shape: Shape
    strategy: Strategy
    exchange: Exchange
    state_bytes: float = 0.0
    """Bytes of state on one process."""
    between_nodes_bytes: float = 0.0
    """Bytes that a node sends to others in a step."""
    within_node_bytes: float = 0.0
    """Bytes that a process sends within its node in a step."""
    seconds: float = 0.0
    why_not: str = ""
    """Empty for the one that was taken."""

    @property
    def name(self) -> str:
        """Name of the layout, as the parity table has it."""
        parts: list[str] = [self.strategy] if self.shape.replicate * self.shape.shard > 1 else []
        parts += ["tensor"] if self.shape.tensor > 1 else []
        is_hybrid = min(self.shape.replicate, self.shape.shard) > 1
        return ("hybrid " if is_hybrid else "") + " x ".join(parts or ["one process"])


def choose_layout(machines: Machines, work: Work) -> list[Candidate]:
    """Return all candidates by their time, the one to take first; it has a `why_not` if none can be taken."""
    num_processes = machines.num_nodes * machines.processes_per_node
    priced = [_price(candidate, machines, work) for candidate in _list_candidates(num_processes, work)]
    priced.sort(key=lambda candidate: (bool(candidate.why_not), candidate.seconds, candidate.state_bytes))
    slower = f"not faster than the {priced[0].seconds:.3g} s of the first"
    return [priced[0], *(replace(other, why_not=other.why_not or slower) for other in priced[1:])]


def describe_layouts(candidates: Sequence[Candidate], machines: Machines) -> list[str]:
    """Return a table of the candidates, a line for each, under a line with the limits. Sizes are in GB."""
    numbers = STATE_SHARE * machines.device_bytes, machines.between_nodes_rate, machines.within_node_rate
    limit, between, within = map(_describe_bytes, numbers)
    processes = f"{machines.num_nodes} x {machines.processes_per_node} processes, {limit} of state"
    return [f"layouts on {processes}, {between}/s a node, {within}/s a process", *map(_describe, candidates)]


def _describe_bytes(number: float) -> str:
    return f"{number / GIGA:.3g} GB"


def _describe(candidate: Candidate) -> str:
    axes = " ".join(f"{axis} {size}" for axis, size in asdict(candidate.shape).items() if size > 1)
    exchange = ", exchange of each micro batch" if candidate.exchange == "micro_batch" else ""
    numbers = candidate.state_bytes, candidate.between_nodes_bytes, candidate.within_node_bytes
    state, between, within = map(_describe_bytes, numbers)
    sizes = f"state {state}, between nodes {between}, within {within}, {candidate.seconds:.3g} s"
    return f"{candidate.name}{exchange} ({axes}): {sizes}: {candidate.why_not or 'taken'}"


def _list_candidates(num_processes: int, work: Work) -> Iterator[Candidate]:
    for tensor in work.tensor_sizes:
        if num_processes % tensor:
            continue
        num_replicas = num_processes // tensor
        for shard in [size for size in range(1, num_replicas + 1) if num_replicas % size == 0]:
            shape = Shape(replicate=num_replicas // shard, shard=shard, tensor=tensor)
            accumulates = _count_micro_batches(shape, work)[0] > 1
            for strategy, exchange in _list_strategies(shape, accumulates):
                yield Candidate(shape, strategy, exchange)


def _list_strategies(shape: Shape, accumulates: bool) -> list[tuple[Strategy, Exchange]]:
    """List what the parity table has for these axes. Of equal ones the simplest: one micro batch is exchanged once."""
    if shape.shard == 1:
        # Over copies of the whole model zero1 sends as much as ddp and keeps less.
        return [("ddp", "step")] if shape.tensor > 1 or shape.size == 1 else []
    if shape.tensor > 1:
        return [("fsdp", "step"), *([("zero2", "step")] if accumulates and shape.replicate == 1 else [])]  # type: ignore[list-item]
    once: list[tuple[Strategy, Exchange]] = [("zero1", "step"), ("fsdp", "step")]
    return [*once, ("zero2", "step"), ("fsdp", "micro_batch")] if accumulates else once


def _price(candidate: Candidate, machines: Machines, work: Work) -> Candidate:
    """Fill in what a candidate keeps and sends, and why it cannot be taken."""
    shape, limit = candidate.shape, STATE_SHARE * machines.device_bytes
    between = within = seconds = 0.0
    for axis, sent in count_bytes_sent(candidate, work).items():
        num_crossing, has_neighbours = _count_crossing(shape, axis, machines.processes_per_node)
        between += num_crossing * sent
        within += sent if has_neighbours else 0.0
        inside = sent / machines.within_node_rate if has_neighbours else 0.0
        seconds += max(num_crossing * sent / machines.between_nodes_rate, inside)
    state, why_not = _estimate_state(candidate, work), ""
    if state > limit:
        why_not = f"its state is more than {_describe_bytes(limit)}"
    if shape.num_data_ranks > work.batch_rows:
        why_not = f"{shape.num_data_ranks} processes cannot share {work.batch_rows} rows"
    sizes = {"state_bytes": state, "between_nodes_bytes": between, "within_node_bytes": within, "seconds": seconds}
    return replace(candidate, **sizes, why_not=why_not)  # type: ignore[arg-type]


def count_bytes_sent(candidate: Candidate, work: Work) -> dict[str, float]:
    """Count the bytes that a process sends along each axis in a step; axes of one process are left out."""
    shape, (num_micro_batches, rows) = candidate.shape, _count_micro_batches(candidate.shape, work)
    parameters = work.num_parameters / shape.tensor
    sharding = resolve_sharding(candidate.strategy, candidate.exchange)
    num_gathers = 1 if sharding.keep_gathered else 2 * num_micro_batches
    num_exchanges = num_micro_batches if sharding.exchange == "micro_batch" else 1
    whole = num_gathers * work.compute_bytes * parameters + num_exchanges * work.reduce_bytes * parameters
    features = num_micro_batches * rows * work.places_of_row * work.num_features * work.compute_bytes
    amounts = {
        "shard": _share_sent(shape.shard) * whole,
        "replicate": 2 * _share_sent(shape.replicate) * work.reduce_bytes * parameters / shape.shard,
        "tensor": 2 * _share_sent(shape.tensor) * features,
    }
    return {axis: amount for axis, amount in amounts.items() if getattr(shape, axis) > 1}


def _estimate_state(candidate: Candidate, work: Work) -> float:
    shape, half = candidate.shape, work.compute_bytes < MASTER_BYTES
    own, accumulates = MASTER_BYTES * work.num_parameters // shape.tensor, _count_micro_batches(shape, work)[0] > 1
    if candidate.strategy != "fsdp":
        return estimate_state_bytes(candidate.strategy, own, shape.shard, accumulates, half)
    gathered = UNITS_GATHERED * own / work.num_layers * work.compute_bytes / MASTER_BYTES
    summed = own if accumulates and candidate.exchange == "step" else 0
    return STATE_COPIES * own / shape.shard + gathered + summed


def _count_micro_batches(shape: Shape, work: Work) -> tuple[int, int]:
    """Return the number of micro batches of a step and their rows, as `BatchPlan` cuts them."""
    share = -(-work.batch_rows // shape.num_data_ranks)
    num_micro_batches = -(-share // (work.micro_batch_rows or share))
    return num_micro_batches, -(-share // num_micro_batches)


def _count_crossing(shape: Shape, axis: str, processes_per_node: int) -> tuple[int, bool]:
    """Count an axis's groups that leave a node, on the node with most; tell whether any has two processes on a node."""
    groups = [{rank // processes_per_node for rank in ranks} for ranks in shape.groups([axis])]
    num_crossing = Counter(node for nodes in groups if len(nodes) > 1 for node in nodes)
    return max(num_crossing.values(), default=0), any(len(nodes) < getattr(shape, axis) for nodes in groups)


def _share_sent(size: int) -> float:
    return (size - 1) / size
