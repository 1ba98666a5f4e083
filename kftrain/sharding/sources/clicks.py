"""Clicks that are made up: ids by Zipf's law, and a teacher whose weight for an id is a hash of it.

So whoever knows the teacher knows the best answer: its area under the curve is the bound of any model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kftrain.data.schema import Record, Source, SourcePart

PIECE_ROWS = 8192

FIELD_STEP = 2**40
"""Distance between the first ids of two fields."""


class ClicksSource(Source):
    """Records `click-00000000` …: `{"ids": int64 [num_fields], "label": 0 or 1}`.

    Args:
        num_rows: Number of records.
        num_fields: Ids of a record.
        num_keys: Ids that a field may have.
        exponent: Exponent of Zipf's law: an id is drawn in proportion to its rank to the power of minus this; not 1.
        seed: Seed of ids and labels.
    """

    def __init__(
        self,
        num_rows: int = 3_000_000,
        num_fields: int = 16,
        num_keys: int = 4_000_000,
        exponent: float = 0.99,
        seed: int = 0,
    ) -> None:
        self.num_rows = num_rows
        self.num_fields = num_fields
        self.num_keys = num_keys
        self.exponent = exponent
        self.seed = seed

    def listing(self) -> list[dict[str, Any]]:
        """List what the records follow from."""
        return [{"name": "clicks", "version": 1, **vars(self)}]

    def parts(self, target_bytes: int) -> list[SourcePart]:
        """Return one part."""
        return [SourcePart(tuple(self.listing()))]

    def read(self, part: SourcePart) -> Iterator[Record]:
        """Yield all records in their order."""
        for start in range(0, self.num_rows, PIECE_ROWS):
            ids, labels, _ = self.draw(start, min(PIECE_ROWS, self.num_rows - start))
            for number, (row, label) in enumerate(zip(ids, labels.tolist(), strict=True), start):
                yield Record(f"click-{number:08d}", {"ids": row, "label": label})

    def draw(self, start: int, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Draw rows of one piece; return ids `[rows, fields]`, labels, and the log-odds that the teacher gives them."""
        generator = np.random.default_rng([self.seed, start])
        # The inverse of the distribution over ranks taken as a continuum, 1 to num_keys + 1.
        power = 1 - self.exponent
        uniform = generator.random((num_rows, self.num_fields))
        ranks = (1 + uniform * ((self.num_keys + 1.0) ** power - 1)) ** (1 / power)
        ids = ranks.astype(np.int64) + FIELD_STEP * np.arange(self.num_fields)
        log_odds = weigh_ids(ids).sum(1) * (4 / np.sqrt(self.num_fields)) - 1.0
        labels = generator.random(num_rows) < 1 / (1 + np.exp(-log_odds))
        return ids, labels.astype(np.int64), log_odds


def weigh_ids(ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the teacher's weight of each id, between -1 and 1."""
    bits = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    weights: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) / 2**52 - 1
    return weights
