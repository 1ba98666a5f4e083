"""A table: rows by key that come into being by themselves, are admitted, updated, and expire.

Only updates change a table. A key without a row is read as the row that it would begin with, which follows from seed,
table and key alone; so reading needs no record, and no order of arrival decides anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kftrain.server.optimizers import RowOptimizer
from kftrain.server.rows import Keys, RowStore, mix_bits
from kftrain.server.settings import TableConfig

Floats = NDArray[np.float32]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The odd increment of splitmix64's counter."""


@dataclass(frozen=True)
class TableSpec:
    """The shape of a table, and how its rows come and go.

    Args:
        name: Its name, part of what a new row's weights follow from.
        dim: Weights of a row.
        seed: The seed of new rows.
        initial: The distribution of a new row's weights.
        initial_scale: The standard deviation of `normal`; the half width of `uniform`.
        num_sightings: Updates for a key after which it has a row; what those before bring is dropped.
        expiry_steps: Updates of the table without one for a row after which the row is removed; 0 keeps all.
    """

    name: str
    dim: int
    seed: int
    initial: Literal["normal", "uniform"] = "normal"
    initial_scale: float = 0.01
    num_sightings: int = 1
    expiry_steps: int = 0


def build_spec(config: TableConfig, seed: int) -> TableSpec:
    """Build the spec of a table of a run with this seed."""
    values = config.model_dump(exclude={"optimizer", "learning_rate"})
    return TableSpec(seed=seed, **values)


def draw_initial_weights(spec: TableSpec, keys: Keys) -> Floats:
    """Draw the weights (keys, dim) with which rows begin: a hash of seed, table, key and column, and nothing else."""
    name = int.from_bytes(hashlib.blake2b(spec.name.encode(), digest_size=8).digest(), "little")
    stream = mix_bits(np.array([name ^ (spec.seed % 2**64)], np.uint64))
    columns = np.arange(1, spec.dim + 1, dtype=np.uint64) * GOLDEN
    bits = mix_bits(mix_bits(keys.view(np.uint64) + stream)[:, None] + columns)
    high = (bits >> np.uint64(40)).astype(np.float64) / 2**24
    if spec.initial == "uniform":
        return np.asarray((2 * high - 1) * spec.initial_scale, np.float32)
    low = (bits & np.uint64(2**24 - 1)).astype(np.float64) / 2**24
    # Box and Muller 1958; 1 - high lies in (0, 1], so that its logarithm is finite.
    return np.asarray(np.sqrt(-2 * np.log(1 - high)) * np.cos(2 * np.pi * low) * spec.initial_scale, np.float32)


class RowTable:
    """Rows of one server for one table. Not for several threads at once."""

    def __init__(self, spec: TableSpec, optimizer: RowOptimizer, folder: Path) -> None:
        self.spec = spec
        self.num_updates = 0
        self.revision = 0
        """It changes when rows come, go or lie elsewhere."""
        self._updated: list[Keys] | None = None
        self._optimizer = optimizer
        self._rows = RowStore(spec.dim + optimizer.count_state(spec.dim), folder)
        self._candidates = RowStore(0, folder)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_bytes(self) -> int:
        """Bytes that the rows and candidates take, with what stands ready for more."""
        return self._rows.num_bytes + self._candidates.num_bytes

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """Look up the rows of keys that will be read and then updated: what `read` wants, until the next update."""
        numbers = self._rows.find(keys)
        self._rows.remember(keys, numbers)
        return numbers

    def read(self, keys: Keys, numbers: NDArray[np.int64] | None = None) -> Floats:
        """Read the weights (keys, dim) of any keys, duplicates included. `numbers`: what `find` gave for them."""
        if numbers is None:
            numbers = self._rows.find(keys)
        is_new = numbers < 0
        if not is_new.any():
            return self._rows.read(numbers, self.spec.dim)
        weights = np.empty((len(keys), self.spec.dim), np.float32)
        weights[is_new] = draw_initial_weights(self.spec, keys[is_new])
        weights[~is_new] = self._weights[numbers[~is_new]]
        return weights

    def update(self, keys: Keys, gradients: Floats) -> None:
        """Make one update of the table with gradients (keys, dim) of distinct keys, then remove what has expired."""
        self.update_in_parts([(keys, gradients)])

    def update_in_parts(self, parts: Sequence[tuple[Keys, Floats]]) -> None:
        """Make one update of the table with several arrays of keys and gradients; no key comes twice in them all."""
        self.num_updates += 1
        self.revision += 1
        all_keys = np.concatenate([keys for keys, _ in parts])
        if self._updated is not None:
            self._updated.append(all_keys)
        numbers = self._admit(all_keys)
        start = 0
        for keys, gradients in parts:
            self._update_rows(numbers[start : start + len(keys)], gradients)
            start += len(keys)
        if self.num_updates % self._expiry_interval == 0:
            self._expire(self.num_updates)

    def _update_rows(self, numbers: NDArray[np.int64], gradients: Floats) -> None:
        if (numbers < 0).any():
            gradients, numbers = gradients[numbers >= 0], numbers[numbers >= 0]
        rows = self._rows.gather(numbers)
        num_missed = self.num_updates - 1 - rows["last_use"].astype(np.int64)
        num_missed[rows["version"] == 0] = 0
        block, missed = torch.from_numpy(rows["numbers"]), torch.from_numpy(num_missed)
        self._optimizer.update(block, torch.from_numpy(gradients), self.num_updates, missed)
        rows["version"] += np.uint32(1)
        rows["last_use"] = self.num_updates
        self._rows.scatter(numbers, rows)

    def view(self) -> dict[str, NDArray[np.void]]:
        """Return rows and candidates as they lie in memory, until the next update; the state, with `num_updates`."""
        return {"rows": self._rows.live, "candidates": self._candidates.live}

    def load(self, num_updates: int, rows: NDArray[np.void], candidates: NDArray[np.void]) -> None:
        """Take what `view` has returned into an empty table."""
        assert not len(self), "there are rows already"
        self.num_updates = num_updates
        self._rows.put(rows)
        self._candidates.put(candidates)

    def take_updated(self) -> list[Keys]:
        """Return the keys that were updated since the last call, by updates; at the first call, all that are known."""
        stores = (self._rows, self._candidates)
        keys = [rows.live["key"].copy() for rows in stores] if self._updated is None else self._updated
        self._updated = []
        return keys

    def forget_updated(self) -> None:
        """Let the next `take_updated` return all keys."""
        self._updated = None

    def copy_rows(self, keys: Keys) -> list[NDArray[np.void]]:
        """Copy the rows, and the candidates, of distinct keys, as far as there are any."""
        stores = (self._rows, self._candidates)
        return [rows.gather(numbers[numbers >= 0]) for rows in stores for numbers in [rows.find(keys)]]

    def put_rows(self, rows: NDArray[np.void], are_candidates: bool) -> None:
        """Take copied rows, or candidates, with all that is known of their keys."""
        here, other = (self._rows, self._candidates)[:: -1 if are_candidates else 1]
        here.put(rows)
        _remove_present(other, rows["key"].copy())
        self.revision += 1

    def remove_keys(self, keys: Keys) -> None:
        """Remove all that is known of some distinct keys."""
        for rows in (self._rows, self._candidates):
            _remove_present(rows, keys)
        self.revision += 1

    def take_num_updates(self, num_updates: int) -> None:
        """Take the number of updates from where rows were copied, and remove what has expired there since."""
        self.num_updates = num_updates
        self._expire(num_updates - num_updates % self._expiry_interval)
        self.revision += 1

    @property
    def _weights(self) -> Floats:
        weights: Floats = self._rows.live["numbers"][:, : self.spec.dim]
        return weights

    def _admit(self, keys: Keys) -> NDArray[np.int64]:
        """Count sightings, begin the rows that are due, and return the row of each key, -1 where there is none."""
        numbers = self._rows.recall(keys)
        is_due = numbers < 0
        if self.spec.num_sightings > 1 and is_due.any():
            is_due[is_due] = self._count_sightings(keys[is_due])
        if is_due.any():
            due = keys[is_due]
            numbers[is_due] = new = self._rows.insert(due)
            self._weights[new] = draw_initial_weights(self.spec, due)
            self._optimizer.begin(torch.from_numpy(self._rows.live["numbers"])[:, self.spec.dim :], new)
        return numbers

    def _count_sightings(self, keys: Keys) -> NDArray[np.bool_]:
        """Note one more sighting of each key; return where there are enough. Those are candidates no longer."""
        self._candidates.insert(keys[self._candidates.find(keys) < 0])
        numbers = self._candidates.find(keys)
        live = self._candidates.live
        live["version"][numbers] += np.uint32(1)
        live["last_use"][numbers] = self.num_updates
        is_due: NDArray[np.bool_] = live["version"][numbers] >= self.spec.num_sightings
        self._candidates.remove(keys[is_due])
        return is_due

    @property
    def _expiry_interval(self) -> int:
        # Looking at every row costs as much as an update of a few: a sixteenth of the time to live is soon enough, and
        # the count of updates decides, so that a server and its copy remove the same rows.
        return max(1, self.spec.expiry_steps // 16)

    def _expire(self, num_updates: int) -> None:
        for rows in (self._rows, self._candidates) if self.spec.expiry_steps else ():
            is_old = num_updates - rows.live["last_use"].astype(np.int64) >= self.spec.expiry_steps
            if is_old.any():
                rows.remove(rows.live["key"][is_old])


def _remove_present(rows: RowStore, keys: Keys) -> None:
    present = keys[rows.find(keys) >= 0]
    if present.size:
        rows.remove(present)
