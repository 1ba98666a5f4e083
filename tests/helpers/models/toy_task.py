"""A task for tests that needs no torch: text is cut into rows of eight bytes, one record per block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kftrain.data.schema import Arrays, Block, Field, Record, SampleSchema
from kftrain.tasks import Task


class ToyTask(Task):
    """Fields `data` uint8 [width] and `length` int64 (bytes of the row that are text)."""

    def __init__(self, *, width: int = 8) -> None:
        self.width = width

    def schema(self) -> SampleSchema:
        return SampleSchema((Field("data", "uint8", (self.width,)), Field("length", "int64")))

    def settings(self) -> dict[str, Any]:
        return {"width": self.width}

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        for record in records:
            text = np.frombuffer(record.fields["text"] or b"\0", np.uint8)
            num_rows = -(-text.size // self.width)
            data = np.zeros(num_rows * self.width, np.uint8)
            data[: text.size] = text
            length = np.minimum(self.width, text.size - self.width * np.arange(num_rows, dtype=np.int64))
            yield Block(record.key, {"data": data.reshape(num_rows, self.width), "length": length})

    def content_fields(self) -> tuple[str, ...]:
        return ("text",)

    def baselines(self, samples: Iterable[Arrays]) -> dict[str, dict[str, float]]:
        lengths = [int(arrays["length"].sum()) for arrays in samples]
        return {"length": {"mean": float(np.mean(lengths))}}

    def loss(self, output, batch, weight):
        raise NotImplementedError

    statistics = metrics = loss
