"""Cases whose gradients travel compressed: a bare loop plays all processes by turns, and packs numbers with numpy."""

import contextlib
import functools
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from helpers.parity.defects import patched
from helpers.parity.oracle import STEPS, Case, Curve, adamw, same_llama, warmup_cosine

from kftrain import config
from kftrain.parallel import gradients, replicas
from kftrain.parallel.compression.codecs import Int8Blocks
from kftrain.parallel.compression.low_rank import LowRankSums
from kftrain.parallel.compression.momenta import LocalRule, SparseSums
from kftrain.parallel.compression.shards import PackedSums, ShardedFeedback
from kftrain.parallel.compression.sums import CompressedSums
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import PrecisionConfig
from kftrain.parallel.sharded import local
from kftrain.parallel.transforms import distribute, list_transforms

BLOCK = 256
MOMENTUM, DECAY, CLIP = 0.9, 0.01, 2.0


@dataclass(frozen=True)
class Stage:
    """So many steps in a layout, of which the loop goes on in the next one."""

    processes: int
    steps: int = STEPS
    kind: str = "ddp"


@dataclass(frozen=True)
class How:
    """What the configuration says under `parallel`."""

    kind: str
    stages: tuple[Stage, ...]
    feedback: bool = True
    bucket_bytes: int = 25 << 20
    micro: int = 0
    """Rows of a micro batch; 0: all that a process has."""
    skipped: tuple[int, ...] = ()
    """Steps that count for nothing."""
    exchanged_each: bool = False
    """Gradients travel after each micro batch."""

    @property
    def overrides(self):
        settings = {"compression.kind": self.kind, "bucket_bytes": self.bucket_bytes}
        settings |= {"exchange": "micro_batch"} if self.exchanged_each else {}
        settings |= {} if self.feedback else {"compression.feedback": "false"}
        settings |= {"compression.rank": RANK} if self.kind == "powersgd" else {}
        others = (f"train.micro_batch_size={self.micro}",) if self.micro else ()
        others += ("train.max_nonfinite_steps=3",) if self.skipped else ()
        return (*(f"parallel.{name}={value}" for name, value in settings.items()), *others)


def rounded(rows, kind):
    """What comes of rows `[R, n]` that travel."""
    if kind == "fp16":
        return rows.astype(np.float16).astype(np.float32)
    if kind == "bf16":
        return torch.from_numpy(rows).bfloat16().float().numpy()
    made = np.zeros_like(rows)
    for start in range(0, rows.shape[1], BLOCK):
        block = rows[:, start : start + BLOCK]
        scales = np.abs(block).max(1, keepdims=True) / np.float32(127)
        safe = np.where(scales == 0, np.float32(1), scales)
        made[:, start : start + BLOCK] = np.rint(block / safe) * scales
    return made


def replicated_sum(gradients, errors, how):
    """Sum of the gradients of all processes, each one vector; `errors`, of each process, are changed."""
    size, length = len(gradients), len(gradients[0])
    total = np.zeros(length, np.float32)
    for start, stop in how.buckets:
        chunk = -(-(stop - start) // (size * BLOCK)) * BLOCK
        made = np.zeros((size, chunk), np.float32)
        rows = [np.zeros((size, chunk), np.float32) for _ in range(size)]
        for rank in range(size):
            rows[rank].reshape(-1)[: stop - start] = (gradients[rank] + errors[rank])[start:stop]
        sent = [rounded(each, how.kind) for each in rows] if size > 1 else rows
        for owner in range(size):
            whole = rows[owner][owner].copy()
            for rank in range(size):
                if rank != owner:
                    whole += sent[rank][owner]
            made[owner] = rounded(whole[None], how.kind)[0] if size > 1 else whole
            rows[owner] -= sent[owner]
            rows[owner][owner] = whole - made[owner]
        total[start:stop] = made.reshape(-1)[: stop - start]
        for rank in range(size):
            errors[rank][start:stop] = rows[rank].reshape(-1)[: stop - start] if how.feedback else 0
    return total


@dataclass(frozen=True)
class Laid(How):
    """With the bounds of buckets in the vector of all parameters."""

    buckets: tuple[tuple[int, int], ...] = ()
    factors: dict = field(default_factory=dict)
    """Number of a matrix -> its second factor."""


def lay(how, parameters):
    bounds, start, end = [], 0, 0
    for parameter in parameters:
        if 4 * (end - start + parameter.numel()) > how.bucket_bytes and end > start:
            bounds.append((start, end))
            start = end
        end += parameter.numel()
    return Laid(**how.__dict__, buckets=(*bounds, (start, end)))


def split(vector, parameters):
    """The parts of a vector of all parameters."""
    ends = np.cumsum([each.numel() for each in parameters])
    return [part.reshape(each.shape) for part, each in zip(np.split(vector, ends[:-1]), parameters, strict=True)]


def joined(parts):
    return np.concatenate([part.reshape(-1) for part in parts])


def units_of(network):
    """Numbers of the parameters that travel together where they are sharded: those of each block, and the others."""
    names = [name for name, _ in network.named_parameters()]
    blocks = sorted({name.split(".")[2] for name in names if ".layers." in name})
    of = [[number for number, name in enumerate(names) if f".layers.{block}." in name] for block in blocks]
    return [*of, [number for number, name in enumerate(names) if ".layers." not in name]]


def cut(parts, size):
    """Rows `[size, n]` of what each process owns: its rows of each part, of which the last are filled up."""
    rows = []
    for part in parts:
        height = -(-len(part) // size)
        whole = np.zeros((height * size, *part.shape[1:]), np.float32)
        whole[: len(part)] = part
        rows.append(whole.reshape(size, -1))
    return np.concatenate(rows, 1)


def uncut(rows, like):
    parts, start = [], 0
    for part in like:
        width = -(-len(part) // len(rows)) * int(np.prod(part.shape[1:]))
        parts.append(rows[:, start : start + width].reshape(-1, *part.shape[1:])[: len(part)])
        start += width
    return parts


def sharded_sum(gradients, errors, how, units, parameters):
    """As `replicated_sum`, where each process owns rows of each parameter, and what it owns is not rounded."""
    size, total = len(gradients), [None] * len(parameters)
    brought = [split(gradient + error, parameters) for gradient, error in zip(gradients, errors, strict=True)]
    lost = [[None] * len(parameters) for _ in range(size)]
    for unit in units:
        rows = [cut([parts[number] for number in unit], size) for parts in brought]
        sent = [rounded(each, how.kind) for each in rows]
        whole = np.stack([rows[owner][owner] for owner in range(size)])
        for owner in range(size):
            for rank in range(size):
                if rank != owner:
                    whole[owner] += sent[rank][owner]
        like = [brought[0][number] for number in unit]
        for number, part in zip(unit, uncut(whole, like), strict=True):
            total[number] = part
        for rank in range(size):
            rest = rows[rank] - sent[rank]
            rest[rank] = 0
            for number, part in zip(unit, uncut(rest if how.feedback else rest * 0, like), strict=True):
                lost[rank][number] = part
    for rank in range(size):
        errors[rank] = joined(lost[rank])
    return joined(total)


RANK = 8
"""With fewer, the formula itself is off by 1e-5 of the norm where fp32 adds the processes up in another order."""


def low_rank_sum(gradients, errors, how, parameters):
    """Algorithms 1 and 2 of the paper, over sums, in fp64; the first factors are drawn as kftrain draws them."""
    size, generator, total = len(gradients), torch.Generator().manual_seed(0), []
    brought = [split(gradient + error, parameters) for gradient, error in zip(gradients, errors, strict=True)]
    lost = [[] for _ in range(size)]
    for number in range(len(parameters)):
        parts = [each[number].astype(np.float64) for each in brought]
        rows, columns = parts[0].shape if parts[0].ndim > 1 else (1, 0)
        if size == 1 or RANK * (rows + columns) >= rows * columns:
            made = functools.reduce(np.add, parts)
            rests = [part * 0 for part in parts]
        else:
            drawn = torch.randn(columns, RANK, generator=generator).double().numpy()
            left, _ = np.linalg.qr(sum(part @ how.factors.get(number, drawn) for part in parts))
            how.factors[number] = sum(part.T @ left for part in parts)
            made = left @ how.factors[number].T
            rests = [part - made / size for part in parts]
        total.append(made)
        for rank in range(size):
            lost[rank].append(rests[rank])
    for rank in range(size):
        errors[rank] = joined(lost[rank]).astype(np.float32)
    return joined(total).astype(np.float32)


def weights_of(network, how, stage):
    """What is computed with, by name."""
    names, parameters = zip(*network.named_parameters(), strict=True)
    weights = [parameter.detach() for parameter in parameters]
    if stage.kind != "ddp" and stage.processes > 1:
        for unit in units_of(network):
            parts = [weights[number].numpy() for number in unit]
            for number, part in zip(unit, uncut(rounded(cut(parts, stage.processes), how.kind), parts), strict=True):
                weights[number] = torch.from_numpy(part.copy())
    return {name: weight.clone().requires_grad_() for name, weight in zip(names, weights, strict=True)}


def owned(vector, stage, how, network):
    """What of a vector each process owns, zeros elsewhere."""
    parameters, parts = list(network.parameters()), [np.zeros_like(vector) for _ in range(stage.processes)]
    for rank in range(stage.processes):
        if stage.kind == "ddp":
            for start, stop in how.buckets:
                chunk = -(-(stop - start) // (stage.processes * BLOCK)) * BLOCK
                own = slice(min(start + rank * chunk, stop), min(start + (rank + 1) * chunk, stop))
                parts[rank][own] = vector[own]
            continue
        rows = cut(split(vector, parameters), stage.processes)
        rows[[other for other in range(stage.processes) if other != rank]] = 0
        parts[rank] = joined(uncut(rows, split(vector, parameters)))
    return parts


def gradient_of(case, network, weights, rows, num_terms):
    """One vector, and the rows' part of the mean loss."""
    loss = case.loss(lambda *inputs: torch.func.functional_call(network, weights, inputs), rows) / num_terms
    made = torch.autograd.grad(loss, list(weights.values()))
    return joined([each.numpy() for each in made]), float(loss.detach())


def loop(case, first_weights, parts, how):
    """As `oracle.run`."""
    network = case.network()
    network.load_state_dict({name: torch.tensor(value) for name, value in first_weights.items()})
    parameters = list(network.parameters())
    optimizer, data, laid = case.optimizer(network), case.data(), lay(how, parameters)
    num_rows, losses, norms, step = len(next(iter(data.values()))), [], [], 0
    errors = [np.zeros(sum(each.numel() for each in parameters), np.float32)]
    for stage in how.stages:
        errors = owned(functools.reduce(np.add, errors), stage, laid, network)
        for _ in range(stage.steps):
            places = (np.arange(case.batch) + step * case.batch) % num_rows
            batch = {name: rows[places] for name, rows in data.items()}
            kept, factors = [error.copy() for error in errors], dict(laid.factors)
            applied, loss = gradients_of_step(case, network, batch, errors, stage, laid)
            set_up_step(optimizer, parameters, applied, case.rate(step))
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, case.clip or np.inf)))
            if step in how.skipped:
                errors, norms[-1] = kept, np.inf
                laid.factors.update(factors)
            else:
                optimizer.step()
            losses.append(loss)
            step += 1
    return curve_of(case, losses, norms, network)


def set_up_step(optimizer, parameters, applied, rate):
    """Gives the optimizer the sum of all gradients, one vector, and the rate."""
    for parameter, values in zip(parameters, split(applied, parameters), strict=True):
        parameter.grad = torch.from_numpy(values.copy())
    for group in optimizer.param_groups:
        group["lr"] = rate


def curve_of(case, losses, norms, network):
    rates = [case.rate(number) for number in range(STEPS)]
    return Curve(losses, norms, rates, {name: value.detach() for name, value in network.state_dict().items()})


def gradients_of_step(case, network, batch, errors, stage, how):
    """The sum that is applied, and the mean loss."""
    parameters, units, total = list(network.parameters()), units_of(network), 0.0
    shares = np.array_split(np.arange(case.batch), stage.processes)
    rows = how.micro or len(shares[0])
    weights, num_terms, applied = weights_of(network, how, stage), case.terms(batch), []
    gradients = [None] * stage.processes
    for start in range(0, len(shares[0]), rows):
        for rank, own in enumerate(shares):
            part = {name: values[own[start : start + rows]] for name, values in batch.items()}
            gradient, loss = gradient_of(case, network, weights, part, num_terms)
            gradients[rank] = gradient if gradients[rank] is None else gradients[rank] + gradient
            total += loss
        if how.exchanged_each or start + rows >= len(shares[0]):
            if how.kind == "sign":
                for rank, gradient in enumerate(gradients):  # of a process the error is its momentum
                    errors[rank] = np.float32(MOMENTUM) * errors[rank] + clipped(gradient, stage.processes)
                applied.append(np.sign(sum(np.sign(momentum) for momentum in errors)))
            elif how.kind == "powersgd":
                applied.append(low_rank_sum(gradients, errors, how, parameters))
            elif stage.kind == "ddp":
                applied.append(replicated_sum(gradients, errors, how))
            else:
                applied.append(sharded_sum(gradients, errors, how, units, parameters))
            gradients = [None] * stage.processes
    return functools.reduce(np.add, applied), total


def clipped(gradient, processes, limit=CLIP):
    """A process's own gradient, by its part of the limit: in torch, whose norm in fp32 is another one than in fp64."""
    whole = torch.nn.Parameter(torch.from_numpy(gradient))
    whole.grad = torch.from_numpy(gradient.copy())
    torch.nn.utils.clip_grad_norm_([whole], limit / processes**0.5)
    return whole.grad.numpy()


UNCLIPPED = ("train.gradient_clip_norm=0",)
"""Where several processes have parts, their norm is off by a bit; scaled by that, a code would flip sooner or later."""


def by_sgd(kind, stages, **others):
    """A case of plain SGD; of signs each process has a momentum, and clips its own gradient."""
    how, clip = How(kind, stages, **others), 0.0 if kind == "sign" else CLIP
    momentum = MOMENTUM if kind == "sign" else 0
    settings = ("optimizer.kind=sgd", f"optimizer.momentum={momentum}", f"optimizer.weight_decay={DECAY}")
    rate = ("optimizer.learning_rate=0.002",) if kind == "sign" else ()
    case = case_of(how, (*settings, *rate, f"train.gradient_clip_norm={CLIP}"), clip=clip)
    case = replace(case, optimizer=plain_sgd, rate=slow if rate else case.rate)
    is_large = max(stage.processes for stage in stages) > 3
    return replace(case, batch=8, overrides=(*case.overrides, "train.global_batch_size=8")) if is_large else case


def slow(step):
    return warmup_cosine(step) / 10


def fused_adamw(network):
    """As `oracle.adamw`, by torch's other kernel: a weight that is off by a bit would flip a code sooner or later."""
    groups = adamw(network).param_groups
    return torch.optim.AdamW(
        [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups],
        lr=1.0,
        betas=(0.8, 0.9),
        eps=1e-3,
        fused=True,
    )


def case_of(how, overrides=(), **others):
    """A case of the language model that computes as kftrain's own."""
    name = f"{how.kind}, compressed"
    return Case(
        name,
        (*how.overrides, *overrides),
        same_llama,
        optimizer=fused_adamw,
        loop=functools.partial(loop, how=how),
        **others,
    )


def on(kind, processes, layout="ddp", **others):
    """The case of a training that begins and ends on as many processes."""
    how = How(kind, (Stage(processes, kind=layout),), **others)
    case = case_of(how) if layout == "ddp" else case_of(how, UNCLIPPED, clip=0.0)
    return case if processes < 4 else replace(case, batch=8, overrides=(*case.overrides, "train.global_batch_size=8"))


# -- the largest numbers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse:
    """What the configuration says of `topk`."""

    stages: tuple[Stage, ...]
    density: float = 0.01
    warmup_steps: int = 0
    bucket_bytes: int = 25 << 20
    clip: float = CLIP
    skipped: tuple[int, ...] = ()

    @property
    def overrides(self):
        settings = {"compression.kind": "topk", "compression.density": self.density, "bucket_bytes": self.bucket_bytes}
        settings |= {"compression.warmup_steps": self.warmup_steps} if self.warmup_steps else {}
        others = ("optimizer.kind=sgd", f"optimizer.weight_decay={DECAY}", f"train.gradient_clip_norm={self.clip}")
        others += ("train.max_nonfinite_steps=3",) if self.skipped else ()
        return (*(f"parallel.{name}={value}" for name, value in settings.items()), *others)

    def density_of(self, step):
        if step >= self.warmup_steps:
            return self.density
        return max(self.density, (1 / 4, 1 / 16, 1 / 64, 1 / 256)[4 * step // self.warmup_steps])

    def is_masking(self, step):
        return 4 * step >= 3 * self.warmup_steps


def sparse_loop(case, first_weights, parts, how):
    """As `loop`, of section 3 of the paper: SGD has no momentum, each process has one.

    What waits is in units of weights: a momentum counts by the rate of its own step.
    """
    network = case.network()
    network.load_state_dict({name: torch.tensor(value) for name, value in first_weights.items()})
    parameters = list(network.parameters())
    optimizer, data = plain_sgd(network), case.data()
    buckets = lay(How("topk", (), bucket_bytes=how.bucket_bytes), parameters).buckets
    num_rows, losses, norms, step = len(next(iter(data.values()))), [], [], 0
    whole = Stage(1)
    momenta, waiting = ([np.zeros(sum(each.numel() for each in parameters), np.float32)] for _ in range(2))
    for stage in how.stages:
        laid = Laid("topk", (), buckets=buckets)
        momenta, waiting = (owned(functools.reduce(np.add, each), stage, laid, network) for each in (momenta, waiting))
        for _ in range(stage.steps):
            places = (np.arange(case.batch) + step * case.batch) % num_rows
            batch = {name: rows[places] for name, rows in data.items()}
            applied, loss = np.zeros_like(waiting[0]), 0.0
            before = [each.copy() for each in momenta], [each.copy() for each in waiting]
            for rank, own in enumerate(np.array_split(np.arange(case.batch), stage.processes)):
                part = {name: values[own] for name, values in batch.items()}
                gradient, more = gradient_of(case, network, weights_of(network, None, whole), part, case.terms(batch))
                loss += more
                if how.clip:
                    gradient = clipped(gradient, stage.processes, how.clip)
                momenta[rank] = np.float32(MOMENTUM) * momenta[rank] + gradient
                waiting[rank] = waiting[rank] + np.float32(case.rate(step)) * momenta[rank]
                for start, stop in buckets:
                    unit = stage.processes * BLOCK
                    count = int(np.ceil(how.density_of(step) * (-(-(stop - start) // unit) * unit)))
                    largest = start + np.argsort(-np.abs(waiting[rank][start:stop]), kind="stable")[:count]
                    if stage.processes == 1:
                        largest = slice(start, stop)
                    applied[largest] += waiting[rank][largest] / np.float32(case.rate(step))
                    waiting[rank][largest] = 0
                    if stage.processes > 1 and how.is_masking(step):
                        momenta[rank][largest] = 0
            set_up_step(optimizer, parameters, applied, case.rate(step))
            norms.append(float(np.sqrt(np.square(applied.astype(np.float64)).sum())))
            if step in how.skipped:
                (momenta, waiting), norms[-1] = before, np.inf
            else:
                optimizer.step()
            losses.append(loss)
            step += 1
    return curve_of(case, losses, norms, network)


def plain_sgd(network):
    parameters = list(network.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": DECAY},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=1.0)


def sparse(stages, **others):
    """A case; beyond two processes its batches are of eight."""
    how = Sparse(stages, **others)
    case = Case("topk", how.overrides, same_llama, loop=functools.partial(sparse_loop, how=how))
    is_large = max(stage.processes for stage in stages) > 3
    return replace(case, batch=8, overrides=(*case.overrides, "train.global_batch_size=8")) if is_large else case


# -- what must hold, and what is broken on purpose ---------------------------------------------------------------------

NUM_BEFORE = 7
"""Steps before a resume."""


def going_on(kind, first, second):
    """A training that stops in a layout and goes on in another one."""
    stages = Stage(first[0], NUM_BEFORE, first[1]), Stage(second[0], STEPS - NUM_BEFORE, second[1])
    return case_of(How(kind, stages), UNCLIPPED, clip=0.0)


@contextlib.contextmanager
def feedback_is_conserved():
    """A resume must keep, over all processes, what the checkpoint has of each number, to the bit."""
    with contextlib.ExitStack() as stack:
        for kind in (CompressedSums, SparseSums, LowRankSums, ShardedFeedback):
            load = functools.partialmethod(_load_and_compare, before=kind.load, kind=kind)
            stack.enter_context(patched(kind, "load", load))
        yield


def _load_and_compare(feedback, state, before, kind):
    if type(feedback) is not kind:  # what a class asks of the one that it derives from
        return before(feedback, state)
    names = [name for name in ("lost", "momentum") if name in state]
    loaded = {name: {key: local(value).clone() for key, value in state[name].items()} for name in names}
    before(feedback, state)
    kept = feedback.save()
    for name in names:
        assert kept[name].keys() == loaded[name].keys()
        assert all(torch.equal(local(kept[name][key]), value) for key, value in loaded[name].items())
    assert any(bool(value.any()) for value in loaded["lost"].values()), "nothing was lost"
    assert int(state.get("num_steps", NUM_BEFORE)) == NUM_BEFORE
    return None


def feedback_dropped():
    """A resume leaves what was lost in the checkpoint."""
    return _loading(lambda feedback, state: None, lambda feedback, state: None)


def feedback_counted_twice():
    """A resume gives the sum of what was lost to each process."""

    def load(sums, state):
        for name in sums._parameters:
            sums._view(sums._feedback, name).copy_(state["lost"][name])

    def load_parts(feedback, state, before=ShardedFeedback.load):
        before(feedback, state)
        dist.all_reduce(feedback._feedback)
        feedback._next_feedback.copy_(feedback._feedback)

    return _loading(load, load_parts)


def _loading(of_replicas, of_shards):
    stack = contextlib.ExitStack()
    stack.enter_context(patched(CompressedSums, "load", of_replicas))
    stack.enter_context(patched(ShardedFeedback, "load", of_shards))
    return stack


def compressed_after_clipping():
    """Gradients are clipped by the norm of what they are before they travel."""

    def exchange(sums, before=CompressedSums.exchange):
        own = [each.grad for each in sums._parameters.values()]
        whole = [each.clone() for each in own]
        for each in whole:
            dist.all_reduce(each)
        gradients.clip_gradients(own, gradients.compute_total_norm(whole, None, whole[0].device), 2.0)
        before(sums)

    return patched(CompressedSums, "exchange", exchange)


def scale_of_two_blocks():
    """A block has the larger scale of it and its neighbour."""

    def pack(codec, rows, before=Int8Blocks.pack):
        blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % (2 * BLOCK))).view(len(rows), -1, 2 * BLOCK)
        scales = (blocks.abs().amax(2) / 127).repeat_interleave(2, 1)
        codes = blocks.view(len(rows), -1, BLOCK) / torch.where(scales == 0, 1.0, scales).unsqueeze(2)
        count = -(-rows.shape[1] // BLOCK)
        packed = scales[:, :count].contiguous().view(torch.uint8), codes[:, :count].round().to(torch.int8).flatten(1)
        return torch.cat([packed[0], packed[1].view(torch.uint8)], 1)

    return patched(Int8Blocks, "pack", pack)


def scales_of_another_rank():
    """What came of one process is unpacked with the scales of another one."""

    def unpack(codec, packed, num_numbers, before=Int8Blocks.unpack):
        width = packed.shape[1] // (4 + BLOCK) * 4
        return before(codec, torch.cat([packed[:, :width].roll(1, 0), packed[:, width:]], 1), num_numbers)

    return patched(Int8Blocks, "unpack", unpack)


def momentum_of_what_is_sent():
    """What is sent keeps its momentum."""

    def exchange_bucket(sums, start, end, before=SparseSums.exchange_bucket):
        momentum = sums._next_momentum[start:end].clone()
        for _ in before(sums, start, end):
            yield
        sums._next_momentum[start:end] = momentum

    return patched(SparseSums, "exchange_bucket", exchange_bucket)


@contextlib.contextmanager
def not_finite(steps, rank):
    """In some steps a gradient of one process is infinite."""
    numbers = []

    def add_gradients(sums, before=CompressedSums.add_gradients):
        if dist.get_rank() == rank and len(numbers) in steps:
            next(iter(sums._parameters.values())).grad.view(-1)[0] = np.inf
        numbers.append(1)
        before(sums)

    def call(sums, *arguments, before=PackedSums.__call__, **named):
        unit, count = numbers.index(sums) if sums in numbers else len(numbers), getattr(sums, "count", 0)
        numbers.extend([] if sums in numbers else [sums])
        if dist.get_rank() == rank and unit == 0 and count in steps:
            named["input_tensor"][0] = np.inf
        sums.count = count + 1
        before(sums, *arguments, **named)

    with patched(CompressedSums, "add_gradients", add_gradients), patched(PackedSums, "__call__", call):
        yield


# -- what is applied and what is kept are all gradients ----------------------------------------------------------------


class Given(torch.nn.Module):
    """Its gradients are what it is given; `rare` is used in some steps only, and one part is frozen."""

    def __init__(self):
        super().__init__()
        self.often = torch.nn.Parameter(torch.zeros(37, 11))
        self.rare = torch.nn.Parameter(torch.zeros(5, 300))
        self.frozen = torch.nn.Linear(3, 2).requires_grad_(False)

    def forward(self, often, rare):
        total = (self.often * often).sum() + self.frozen(often[:1, :3]).sum()
        return total if rare is None else total + (self.rare * rare).sum()


def count_all(world, overrides, unused_steps, num_steps=6):
    """Name -> what was applied in all steps, what is kept, and the sum of all gradients; steps that left `rare` out."""
    parallel = config.parse("", list(overrides)).parallel
    mesh = Mesh(parallel.shape(world.size), world)
    model, left_out = Given(), []
    rule = LocalRule(0.0, 0.0)
    strategy = list_transforms(
        parallel, PrecisionConfig(), [], mesh.shape, rule=rule if "topk" in str(overrides) else None
    )
    distributed = distribute(model, strategy, mesh, ["frozen"])
    distributed.begin()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    applied, brought = ({name: torch.zeros(each.shape) for name, each in trained.items()} for _ in range(2))
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(num_steps):
        often, rare = torch.randn(37, 11, generator=generator), torch.randn(5, 300, generator=generator)
        given = {"often": often, "rare": rare} if step not in unused_steps else {"often": often}
        distributed.accumulate(True)
        with distributed.computing():
            model(often, given.get("rare")).backward()
        distributed.hand_over()
        distributed.agree(world.sum)
        for name, parameter in trained.items():
            if parameter.grad is None:
                left_out.append((step, name))
                continue
            applied[name] += whole(parameter.grad)
        distributed.settle(torch.zeros(()))
        for name, values in given.items():
            dist.all_reduce(values)
            brought[name] += values
        for parameter in model.parameters():
            parameter.grad = None
    kept = {name: whole(value) for name, value in distributed.parts["feedback"].save()["lost"].items()}
    return {name: (applied[name], kept[name], brought[name]) for name in applied}, left_out


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def count_buckets(world, overrides):
    """Number of exchanges of gradients in the second step of ddp, when torch has laid out its buckets."""
    parallel = config.parse("", ["parallel.strategy=ddp", *overrides]).parallel
    mesh, numbers = Mesh(parallel.shape(world.size), world), []
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(4)))
    distributed = distribute(model, list_transforms(parallel, PrecisionConfig(), [], mesh.shape), mesh, [])
    distributed.begin()

    def sum_bucket(*arguments, before=replicas._sum_bucket):
        numbers[-1] += 1
        return before(*arguments)

    with patched(replicas, "_sum_bucket", sum_bucket):
        for _ in range(2):
            numbers.append(0)
            distributed.accumulate(True)
            with distributed.computing():
                model(torch.ones(1, 32)).sum().backward()
    return numbers[-1]
