"""Cases of islands: a bare loop trains the networks of all islands by turns, and moves the outer one with numpy."""

import contextlib
import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from helpers.parity import optimizers
from helpers.parity.compression import BLOCK, fused_adamw, rounded
from helpers.parity.defects import patched
from helpers.parity.oracle import STEPS, Case, Curve, same_llama

from kftrain.parallel.outer_exchange import CollectiveExchange, Feedback
from kftrain.server.outer_gradients import OuterGradients
from kftrain.train.islands import Islands
from kftrain.train.served_exchange import ServedExchange

SEED = 3
"""That of the run: what the noise of the servers follows from, with part, piece and update."""


@dataclass(frozen=True)
class How:
    """What the configuration says under `train.outer`, and the layout as far as it counts."""

    islands: int = 2
    steps: int = 3
    optimizer: str = "nesterov"
    encoding: str = "fp32"
    copies: int = 1
    """Processes of an island with the same parameters: each sends a part of the vector, in blocks of its own."""
    stop: int = STEPS
    """Last step of the loop."""
    fragments: int = 1
    """Parts of the vector that have turns of their own."""
    servers: int = 0
    """Servers that the islands exchange through; the numbers do not depend on how many."""

    @property
    def overrides(self):
        outer = {"steps": self.steps, "optimizer": self.optimizer, "encoding": self.encoding}
        outer["num_fragments"] = self.fragments
        shape = f"parallel.islands={self.islands}", f"server.num_servers={self.servers}"
        return (*shape, *(f"train.outer.{name}={value}" for name, value in outer.items()))


def scale_rows(numbers):
    """Rows of 64 numbers over the least power of two that makes them -127 to 127, and these powers."""
    rows = numbers.reshape(-1, 64)
    powers = np.ones((len(rows), 1))
    for row, power in zip(rows, powers, strict=True):
        while np.abs(row).max() > 127 * power[0]:
            power *= 2
        while 0 < np.abs(row).max() <= 127 * power[0] / 2:
            power /= 2
    return rows / powers, powers


def served_mean(vectors, errors, how, update):
    """As `mean_over_islands`, by servers: an island's number is rounded once, the mean of all by chance."""
    length, unit = len(vectors[0]), 64 * how.copies
    arrived = []
    for vector, error in zip(vectors, errors, strict=True):
        row = np.zeros(-(-length // unit) * unit, np.float32)
        row[:length] = vector + error
        scaled, powers = scale_rows(row)
        arrived.append((np.rint(scaled) * powers).astype(np.float32).reshape(-1))
        error[:] = (row - arrived[-1])[:length]
    mean = sum(arrived[1:], arrived[0].copy()) / np.float32(how.islands)
    parts = []
    for copy, part in enumerate(np.split(mean, how.copies)):
        scaled, powers = scale_rows(part)
        noise = np.random.default_rng([SEED, copy, 0, update]).random(part.shape, np.float32).reshape(-1, 64)
        whole = np.clip(np.floor(scaled.astype(np.float32) + noise), -127, 127)
        parts.append((whole * powers).astype(np.float32).reshape(-1))
    return np.concatenate(parts)[:length]


def mean_over_islands(vectors, errors, how, update):
    """Mean of the vectors of all islands, as it comes to each of them; `errors`, of each island, are changed."""
    if how.encoding == "fp32":
        return sum(vectors[1:], vectors[0].copy()) / np.float32(how.islands)
    if how.servers:
        return served_mean(vectors, errors, how, update)
    size, length = how.islands, len(vectors[0])
    unit = BLOCK * size * how.copies
    rows = [np.zeros(-(-length // unit) * unit, np.float32) for _ in vectors]
    for row, vector, error in zip(rows, vectors, errors, strict=True):
        row[:length] = vector + error
    chunks = [row.reshape(how.copies, size, -1) for row in rows]  # part of each copy, chunk of each owner
    total = np.zeros_like(chunks[0])
    for copy in range(how.copies):
        sent = [rounded(chunk[copy], how.encoding) for chunk in chunks]
        for owner in range(size):
            whole = chunks[owner][copy, owner].copy()
            for island in range(size):
                whole += sent[island][owner] if island != owner else 0
            total[copy, owner] = rounded(whole[None], how.encoding)[0]
            sent[owner][owner] = chunks[owner][copy, owner] - whole + total[copy, owner]
        for island in range(size):
            chunks[island][copy] -= sent[island]
    for error, row in zip(errors, rows, strict=True):
        error[:] = row[:length]
    return total.reshape(-1)[:length] / np.float32(size)


def flatten(network):
    return np.concatenate([each.detach().numpy().reshape(-1) for each in network.parameters()])


def add_gradients(case, network, rows, num_copies):
    """Adds the gradients of an island's rows, of which each copy computes its own: so the sums have the same bits."""
    num_terms, total = case.terms(rows), 0.0
    for part in range(num_copies):
        loss = (
            case.loss(network, {name: np.split(values, num_copies)[part] for name, values in rows.items()}) / num_terms
        )
        loss.backward()
        total += float(loss.detach())
    return total


def move_outer(outer, momentum, gradient, how):
    """Moves the outer parameters in place, and their momentum."""
    if how.optimizer == "average":
        outer -= gradient
    elif how.encoding == "fp32":
        momentum[:] = np.float32(0.9) * momentum + gradient
        outer -= np.float32(0.7) * (gradient + np.float32(0.9) * momentum)
    else:  # by kernels that round as the engine's: a number that is off by one may flip a code of int8
        weights = torch.nn.Parameter(torch.from_numpy(outer))
        weights.grad = torch.from_numpy(gradient)
        optimizer = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True, foreach=False)
        optimizer.state[weights]["momentum_buffer"] = torch.from_numpy(momentum)
        optimizer.step()


def parts_due(how, num_steps, network):
    """The parts of the vector that are exchanged after so many steps; a parameter is of that which its middle is in."""
    sizes = np.array([parameter.numel() for parameter in network.parameters()])
    ends = np.cumsum(sizes)
    owners = (ends - sizes / 2) // (ends[-1] / how.fragments)
    parts = [slice(sizes[owners < number].sum(), sizes[owners <= number].sum()) for number in range(how.fragments)]
    if num_steps == STEPS:
        return [part for part in parts if part.start < part.stop]
    turns = [how.steps * (number + 1) // how.fragments for number in range(how.fragments)]
    due = [part for part, turn in zip(parts, turns, strict=True) if num_steps % how.steps == turn % how.steps]
    return [part for part in due if part.start < part.stop]


def loop(case, first_weights, parts, how):
    """The curve of the islands' mean losses and norms, and the outer weights at the end."""
    networks = [case.network() for _ in range(how.islands)]
    for network in networks:
        network.load_state_dict({name: torch.tensor(value) for name, value in first_weights.items()})
    trained, data = [case.optimizer(network) for network in networks], case.data()
    outer = flatten(networks[0])
    momentum, errors = np.zeros_like(outer), [np.zeros_like(outer) for _ in networks]
    num_rows, losses, norms = len(next(iter(data.values()))), [], []
    for step in range(how.stop):
        places = (np.arange(case.batch) + step * case.batch) % num_rows
        steps = []
        for network, optimizer, own in zip(networks, trained, np.split(places, how.islands), strict=True):
            loss = add_gradients(case, network, {name: values[own] for name, values in data.items()}, how.copies)
            norm = float(torch.nn.utils.clip_grad_norm_(network.parameters(), case.clip))
            for group in optimizer.param_groups:
                group["lr"] = case.rate(step) * group.get("factor", 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps.append((loss, norm))
        losses.append(sum(loss for loss, _ in steps) / how.islands)
        norms.append(sum(norm for _, norm in steps) / how.islands)
        for part in parts_due(how, step + 1, networks[0]):
            vectors = [outer[part] - flatten(network)[part] for network in networks]
            gradient = mean_over_islands(vectors, [error[part] for error in errors], how, step // how.steps)
            move_outer(outer[part], momentum[part], gradient, how)
            for network in networks:
                weights = flatten(network)
                weights[part] = outer[part]
                torch.nn.utils.vector_to_parameters(torch.from_numpy(weights), network.parameters())
    torch.nn.utils.vector_to_parameters(torch.from_numpy(outer), networks[0].parameters())
    weights = {name: value.detach() for name, value in networks[0].state_dict().items()}
    return Curve(losses, norms, [case.rate(step) for step in range(how.stop)], weights)


@functools.cache
def case_of(case=None, **settings):
    """A case of islands, which together have eight rows a step."""
    how = How(**settings)
    if case is None:  # by kernels that give the same bits: a number that is off by one may flip a code of int8
        case = Case() if how.encoding == "fp32" else Case(network=same_llama, optimizer=fused_adamw)
    overrides = (*case.overrides, *how.overrides, "train.global_batch_size=8")
    return replace(case, name=f"{case.name}, {how}", batch=8, overrides=overrides, loop=functools.partial(_loop, how))


def _loop(how, case, first_weights, parts):
    return loop(case, first_weights, parts, how)


MUON = optimizers.MUON
EMPTY = case_of(Case(network=same_llama), steps=12, fragments=12)
"""Half of the fragments have no parameter. The network has its parameters in the model's order, which says whose."""


# -- broken on purpose -------------------------------------------------------------------------------------------------


def an_island_is_left_out():
    """The mean is that of all but the last island."""

    def exchange(self, vector, number, before=CollectiveExchange.exchange):
        size, rank = self._across.size(), self._across.rank()
        ((mean, share),), has_met = before(self, vector * 0 if rank == size - 1 else vector, number)
        return [(mean * size / (size - 1), share)], has_met

    return patched(CollectiveExchange, "exchange", exchange)


def gradients_have_the_wrong_sign():
    before = CollectiveExchange.exchange
    return patched(CollectiveExchange, "exchange", lambda self, vector, number: before(self, -vector, number))


def exchanges_come_a_step_late():
    def finish_step(islands, first_sample, before=Islands.finish_step):
        before(islands, first_sample - islands._train.global_batch_size)

    return patched(Islands, "finish_step", finish_step)


def a_mean_is_not_divided():
    """The servers' means are sums. In the first process, which the servers of a test are in."""

    def _average(self, frame, members, before=OuterGradients._average):
        return before(self, frame, members) * np.float32(len(members))

    return patched(OuterGradients, "_average", _average)


def an_update_is_made_twice():
    def exchange(self, vector, number, before=ServedExchange.exchange):
        means, has_met = before(self, vector, number)
        return [mean for mean in means for _ in range(2)], has_met

    return patched(ServedExchange, "exchange", exchange)


def feedback_is_not_added():
    def add_lost(self, vector, before=Feedback.add_lost):
        self._lost.zero_()
        return before(self, vector)

    return patched(Feedback, "add_lost", add_lost)


def momentum_is_lost_at_resume():
    return _forgetting(lambda islands: islands._momentum.zero_())


def feedback_is_lost_at_resume():
    return _forgetting(lambda islands: islands._exchanges[0]._lost.zero_())


def weights_of_islands_are_lost_at_resume():
    return _forgetting(lambda islands: islands._set_weights(islands._outer))


@contextlib.contextmanager
def _forgetting(forget):
    def make_parts(islands, parts, before=Islands.make_parts):
        made = before(islands, parts)

        def load(state):
            made["islands"].load(state)
            forget(islands)

        return {**made, "islands": replace(made["islands"], load=load)}

    with patched(Islands, "make_parts", make_parts):
        yield
