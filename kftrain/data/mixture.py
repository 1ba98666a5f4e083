"""Several datasets in one training, by weight: which sample of which one stands at a position. Pure numpy, no files.

Weights are shares of a round: a fixed sequence of slots in which each component has as many as its weight says, spread
as evenly as can be (slot j of n lies at (j + 1/2) / n of the round). So where a position lies is a division and a look
into a table: component, and position in the component's own order, which knows nothing of the others and ends its
epochs when it has seen all of its own samples. The state of a training is still one integer.

A component of weight w among k has n * w samples, give or take 1 + w * max(0, k - 2), in any n positions that follow
each other, whatever n is: batches are mixed alike, too. Another phase has other weights; each component goes on where
it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kftrain.data.order import Order
from kftrain.data.read_ahead import StoredSamples
from kftrain.data.schema import Arrays
from kftrain.data.shards.remote_bytes import Fetch
from kftrain.data.shares import compute_slots


@dataclass(frozen=True)
class Phase:
    """Weights of a mixture from a position on."""

    first_position: int
    weights: tuple[float, ...]
    """Weight of each component; those that are 0 pause."""


@dataclass(frozen=True)
class _Rounds:
    """Tables of a phase, ready to be looked up."""

    first_position: int
    components: np.ndarray
    """`[slots]`: component of each slot of a round."""
    ranks: np.ndarray
    """`[slots]`: slots of the same component that come before it in the round."""
    counts: np.ndarray
    """`[components]`: number of slots of each in a round."""
    seen: np.ndarray
    """`[components]`: samples of each before the phase."""

    def locate_in_phase(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return components and positions in them, of positions in this phase."""
        rounds, slots = np.divmod(positions - self.first_position, len(self.components))
        components = self.components[slots]
        return components, self.seen[components] + rounds * self.counts[components] + self.ranks[slots]

    def find_in_phase(self, component: int, places: np.ndarray) -> np.ndarray:
        """Return the positions at which `places` in a component's order stand, the inverse of `locate_in_phase`.

        Of a component that pauses, and so never comes to them, they are these places: any will do.
        """
        count = int(self.counts[component])
        if count == 0:
            return places
        rounds, ranks = np.divmod(places - self.seen[component], count)
        slots = np.flatnonzero(self.components == component)[ranks]
        positions: np.ndarray = self.first_position + rounds * len(self.components) + slots
        return positions

    def count_seen_until(self, position: int) -> np.ndarray:
        """Count the samples of each component before a position of this phase, or its end."""
        rounds, slots = divmod(position - self.first_position, len(self.components))
        begun = np.bincount(self.components[:slots], minlength=len(self.counts))
        seen: np.ndarray = self.seen + rounds * self.counts + begun
        return seen


class MixturePhases:
    """Phases of a mixture, ready to be looked up: the component at a position, and the positions of a component."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        """`phases`: the first begins at position 0."""
        assert phases[0].first_position == 0
        self._phases: list[_Rounds] = []
        seen = np.zeros(len(phases[0].weights), np.int64)
        for phase in phases:
            if self._phases:
                seen = self._phases[-1].count_seen_until(phase.first_position)
            self._phases.append(_make_rounds(phase, seen))
        self._first_positions = np.array([phase.first_position for phase in phases])
        self._seen = np.stack([rounds.seen for rounds in self._phases])

    def split(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return component, and position in the component's own order, of each position; int64 `[k]` each."""
        numbers = np.searchsorted(self._first_positions, positions, side="right") - 1
        components, places = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            components[chosen], places[chosen] = self._phases[number].locate_in_phase(positions[chosen])
        return components, places

    def find_positions(self, component: int, places: np.ndarray) -> np.ndarray:
        """Return the position at which each of `places` in a component's order stands, int64 `[k]` each."""
        numbers = np.searchsorted(self._seen[:, component], places, side="right") - 1
        positions = np.empty(len(places), np.int64)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            positions[chosen] = self._phases[number].find_in_phase(component, places[chosen])
        return positions


class MixtureOrder:
    """The order of a mixture: position -> number of the sample, counted through all components one after another."""

    def __init__(self, orders: Sequence[Order], phases: MixturePhases) -> None:
        """`orders`: of each component."""
        self._orders = list(orders)
        self._starts = np.cumsum([0, *(order.num_samples for order in orders)])
        self.num_samples = int(self._starts[-1])
        """Samples of all components."""
        self.phases = phases

    def locate(self, positions: np.ndarray) -> np.ndarray:
        """Return numbers of the samples, int64 `[k]`, at positions int64 `[k]`."""
        components, places = self.phases.split(positions)
        located = np.empty(len(positions), np.int64)
        for component in np.unique(components).tolist():
            chosen = components == component
            located[chosen] = self._orders[component].locate(places[chosen]) + self._starts[component]
        return located


class Concatenated:
    """Samples of several datasets, numbered through one after another. All methods may be called from any thread."""

    def __init__(self, parts: Sequence[StoredSamples]) -> None:
        """`parts`: all with the same fields."""
        self._parts = list(parts)
        self._starts = np.cumsum([0, *(part.num_samples for part in parts)])

    @property
    def num_samples(self) -> int:
        """Number of samples of all parts."""
        return int(self._starts[-1])

    def read(self, samples: np.ndarray) -> Arrays:
        """Read samples by number, int64 `[k]`: field name -> `[k, *shape]`."""
        owners = np.searchsorted(self._starts, samples, side="right") - 1
        rows: Arrays = {}
        for owner in np.unique(owners).tolist():
            chosen = np.flatnonzero(owners == owner)
            arrays = self._parts[owner].read(samples[chosen] - self._starts[owner])
            for name, values in arrays.items():
                if name not in rows:
                    rows[name] = np.empty((len(samples), *values.shape[1:]), values.dtype)
                rows[name][chosen] = values
        return rows

    def plan_fetches(self, samples: np.ndarray) -> list[Fetch]:
        """Return the requests for what the node lacks of these samples, int64 `[k]`. Raises DataError."""
        owners = np.searchsorted(self._starts, samples, side="right") - 1
        fetches = []
        for owner in np.unique(owners).tolist():
            fetches += self._parts[owner].plan_fetches(samples[owners == owner] - self._starts[owner])
        return fetches

    def place_of(self, sample: int) -> str:
        """Tell people where a sample lies. Slow."""
        owner = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return self._parts[owner].place_of(sample - int(self._starts[owner]))


def _make_rounds(phase: Phase, seen: np.ndarray) -> _Rounds:
    counts = compute_slots(phase.weights)
    times = np.concatenate([(2 * np.arange(count) + 1) / max(count, 1) for count in counts])
    order = np.argsort(times, kind="stable")  # of equal times the first component comes first
    components = np.repeat(np.arange(len(counts)), counts)[order]
    ranks = np.concatenate([np.arange(count) for count in counts])[order]
    return _Rounds(phase.first_position, components, ranks, np.array(counts), seen)
