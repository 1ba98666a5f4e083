"""Islands that do not wait for each other: one is held up, each notes what it was told, a bare loop does the same."""

import contextlib
import functools
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from helpers.parity import islands
from helpers.parity.defects import patched
from helpers.parity.oracle import STEPS

from kftrain.remote_parameters.rounds import RemoteRounds
from kftrain.train.islands import Islands
from kftrain.train.served_exchange import ServedExchange

HELD, FREED = 2, 3
"""Round in which the second island is held up, and that of the first one after which it is let go."""


def noting(folder, holds):
    """A defect of a job: see `note`."""
    return functools.partial(note, str(folder), holds)


@contextlib.contextmanager
def note(folder, holds):
    """Each island writes down what it is told.

    `holds`: the second one begins a round only when the first has finished a later one. Where they wait, this fails.
    """
    free, begun = Path(folder) / "free", {}
    if not holds:
        free.touch()

    def exchange(self, vector, number, before=ServedExchange.exchange):
        island = self._mesh.island
        deadline = time.monotonic() + 60
        while island == 1 and number.number == HELD and not free.exists():
            assert time.monotonic() < deadline, "the first island waits for the second one"
            time.sleep(0.01)
        result = before(self, vector, number)
        if island == 0 and number.number == FREED:
            free.touch()
        return result

    def meet(self, number, *others, before=RemoteRounds.meet):
        updates, has_met = before(self, number, *others)
        begun.setdefault(self._island, number)  # each attempt counts updates anew
        line = {"island": self._island, "round": number, "has_met": has_met}
        line["updates"] = [[1000 * begun[self._island] + update.number, list(update.members)] for update in updates]
        with (Path(folder) / f"told-{self._island}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return updates, has_met

    def collect_metrics(self, before=Islands.collect_metrics):
        metrics = before(self)
        with (Path(folder) / "metrics").open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        return metrics

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(ServedExchange, "exchange", exchange))
        stack.enter_context(patched(RemoteRounds, "meet", meet))
        stack.enter_context(patched(Islands, "collect_metrics", collect_metrics))
        yield


def read_told(folder, island):
    """What an island was told in each of its rounds."""
    return read_lines(folder, f"told-{island}")


def read_lines(folder, name):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


class Alone:
    """An island of the bare loop."""

    def __init__(self, case, how, number, first_weights):
        self.case = case
        self.how = how
        self.number = number
        self.step = 0
        self.network = case.network()
        self.network.load_state_dict({name: torch.tensor(value) for name, value in first_weights.items()})
        self.optimizer = case.optimizer(self.network)
        self.outer = islands.flatten(self.network)
        self.momentum = np.zeros_like(self.outer)

    def take_steps(self):
        """Trains to the end of the round; its outer gradient."""
        data, case = self.case.data(), self.case
        num_rows = len(next(iter(data.values())))
        for step in range(self.step, min(STEPS, self.step + self.how.steps)):
            places = np.split((np.arange(case.batch) + step * case.batch) % num_rows, self.how.islands)[self.number]
            rows = {name: values[places] for name, values in data.items()}
            islands.add_gradients(case, self.network, rows, self.how.copies)
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), case.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = case.rate(step) * group.get("factor", 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step = step + 1
        return self.outer - islands.flatten(self.network)

    def move(self, mean, num_members):
        """Moves by a part of a Nesterov step: the momentum decays, and comes in, by the share of the islands."""
        share = np.float32(num_members / self.how.islands)
        self.momentum[:] = np.float32(0.9) ** share * self.momentum + share * mean
        self.outer -= share * np.float32(0.7) * (mean + np.float32(0.9) * self.momentum)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(self.outer.copy()), self.network.parameters())


def replay(case, how, first_weights, told):
    """The outer parameters of all islands at the end, from the same rounds and updates; each mean is numpy's."""
    alone = [Alone(case, how, number, first_weights) for number in range(how.islands)]
    members = {number: found for lines in told for line in lines for number, found in line["updates"]}
    gradients, means, rounds = {}, {}, defaultdict(int)
    while any(rounds[one.number] < len(told[one.number]) for one in alone):
        moved = False
        for one in alone:
            if rounds[one.number] == len(told[one.number]):
                continue
            line = told[one.number][rounds[one.number]]
            if (one.number, line["round"]) not in gradients:
                gradients[one.number, line["round"]] = one.take_steps()
                moved = True
            for number, found in sorted(members.items()):
                parts = list(zip(found[::2], found[1::2], strict=True))
                if number not in means and all(part in gradients for part in parts):
                    means[number] = sum(gradients[part] for part in parts) / np.float32(len(parts))
            wanted = [number for number, _ in line["updates"]]
            if all(number in means for number in wanted):
                for number in wanted:
                    one.move(means[number], len(members[number]) // 2)
                rounds[one.number] += 1
                moved = True
        assert moved, "an update has a gradient that comes after it"
    return [one.outer for one in alone]
