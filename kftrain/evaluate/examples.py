"""Sample predictions: which groups a report shows, and what the task says of each.

Which ones follows from the groups' sums and places alone, so they are the same for any number of processes; the few
forward passes are one process's.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from kftrain.data.dataset import ShardedDataset
from kftrain.errors import UserCodeError
from kftrain.evaluate.score import Statistics
from kftrain.models.modes import evaluating
from kftrain.plugins import user_code
from kftrain.run.documents import Example
from kftrain.tasks.base import Task
from kftrain.tasks.prepare import decoded

MAX_NAMES = 8
MAX_NAME_CHARACTERS = 40
MAX_TEXT_CHARACTERS = 200
MAX_PICTURE_PX = 48

Shown = Mapping[str, Any]


def losses(task: Task, sums: Statistics, metric: str, goal: str) -> np.ndarray:
    """Of each group what is the larger the worse, `[groups]`: the task's own loss, else the gate's metric.

    Not a number where that does not determine it, or where there is no such metric.
    """
    values = metrics_of_groups(task, sums).get(task.loss_metric or metric)
    if values is None:
        return np.full(len(next(iter(sums.values()))), np.nan)
    return values if task.loss_metric or goal == "minimize" else -values


def choose(worst_first: np.ndarray, num_examples: int) -> list[tuple[int, bool]]:
    """Groups to show, each with whether it is one of the worst: first those spread over the data, by their number.

    `worst_first`: the loss of each group; of equal ones the first in the data leads; one that is not finite is none.
    """
    num_groups = len(worst_first)
    num_spread = min(num_examples, num_groups)
    spread = [(number * num_groups // num_spread, False) for number in range(num_spread)]
    finite = np.flatnonzero(np.isfinite(worst_first))
    worst = finite[np.argsort(-worst_first[finite], kind="stable")[:num_examples]]
    return [*spread, *((group, True) for group in worst.tolist())]


def collect(
    task: Task,
    model: nn.Module,
    dataset: ShardedDataset,
    sums: Statistics,
    num_rows: np.ndarray,
    keys: Sequence[str],
    chosen: Sequence[tuple[int, bool]],
    batch_size: int,
    device: torch.device,
) -> list[Example]:
    """The chosen groups with their metrics, and what the task shows of the first row of each. On one process."""
    groups = sorted({group for group, _ in chosen})
    first_rows = np.cumsum(num_rows) - num_rows
    rows = [int(first_rows[group]) for group in groups]
    shown = dict(zip(groups, _shown(task, model, dataset, rows, batch_size, device), strict=True))
    metrics = metrics_of_groups(task, sums)
    return [
        Example(
            key=keys[group],
            is_worst=is_worst,
            metrics={name: float(values[group]) for name, values in metrics.items() if np.isfinite(values[group])},
            **_fields(shown[group]),
        )
        for group, is_worst in chosen
    ]


def metrics_of_groups(task: Task, sums: Statistics) -> dict[str, np.ndarray]:
    """Each metric of each group alone, `[groups]`."""
    with user_code("task.metrics"), np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {name: np.asarray(values, np.float64) for name, values in task.metrics(sums).items()}


def _shown(
    task: Task, model: nn.Module, dataset: ShardedDataset, rows: list[int], batch_size: int, device: torch.device
) -> list[Shown]:
    """What the task shows of each row."""
    found: list[Shown] = []
    for start in range(0, len(rows), batch_size):
        parts = [dataset.read_range(row, row + 1)[0] for row in rows[start : start + batch_size]]
        arrays = decoded(task, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
        with evaluating(model), torch.no_grad(), user_code("task.examples"):
            batch = {name: tensor.to(device) for name, tensor in task.batch(arrays).items()}
            found += task.examples(model, arrays, batch)
    if len(found) != len(rows) or not all(isinstance(each, Mapping) for each in found):
        raise UserCodeError(f"must return a mapping for each of {len(rows)} rows", where="task.examples")
    return found


def _fields(shown: Shown) -> dict[str, Any]:
    """`shown` and `picture` of an example: texts are cut, the first picture is made small."""
    pictures = [value for value in shown.values() if isinstance(value, np.ndarray) and value.ndim > 0]
    texts = {
        str(name)[:MAX_NAME_CHARACTERS]: _text(value)
        for name, value in shown.items()
        if not (isinstance(value, np.ndarray) and value.ndim > 0)
    }
    picture = base64.b64encode(_png(_thumbnail(pictures[0]))).decode() if pictures else ""
    return {"shown": dict(list(texts.items())[:MAX_NAMES]), "picture": picture}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else f"{float(value):.6g}" if isinstance(value, float) else str(value)
    cut = text if len(text) <= MAX_TEXT_CHARACTERS else text[: MAX_TEXT_CHARACTERS - 1] + "\u2026"
    return cut.encode("utf-8", "replace").decode()


def _thumbnail(picture: np.ndarray) -> np.ndarray:
    """At most `MAX_PICTURE_PX` high and wide: the means of equal squares; what is left over is cut off."""
    if (
        picture.dtype != np.uint8
        or 0 in picture.shape
        or not (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] == 3))
    ):
        raise UserCodeError(
            "a picture must be uint8 [height, width] or [height, width, 3]",
            where="task.examples",
            value=f"{picture.dtype} {list(picture.shape)}",
        )
    side = max(1, -(-max(picture.shape[:2]) // MAX_PICTURE_PX))
    high, wide = (min(side, size) for size in picture.shape[:2])
    height, width = picture.shape[0] // high, picture.shape[1] // wide
    squares = picture[: height * high, : width * wide].reshape(height, high, width, wide, *picture.shape[2:])
    small: np.ndarray = squares.mean(axis=(1, 3)).astype(np.uint8)
    return small


def _png(picture: np.ndarray) -> bytes:
    """The picture as a PNG file."""
    height, width = picture.shape[:2]
    lines = b"".join(b"\0" + line.tobytes() for line in picture)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if picture.ndim == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
