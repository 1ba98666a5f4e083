"""Skip-gram over identifiers (Mikolov et al. 2013, arXiv:1310.4546): which names stand near which in a text.

A sample is a name of a text, `center`, and `candidates`: one that stands at most `max_distance` names away, and
`num_negatives` that are drawn from all names, each by its count to the power of 3/4. The model gives the log-odds of
each candidate. Ids are hashes of names: a text may have any, and no list of them need be complete.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field as Limits

from kftrain.data.schema import Arrays, Block, Field, Record, SampleSchema
from kftrain.errors import ConfigError, DataError
from kftrain.settings.section import Count
from kftrain.tasks.base import Task
from kftrain.tasks.language_modeling import get_text

if TYPE_CHECKING:
    import pandas
    import torch

    from kftrain.tasks.base import Batch

NAME = re.compile(r"\b[^\W\d]\w*")

MAX_NAME_CHARACTERS = 128
"""Length of the longest name; what is longer is data."""

FILE_NAME = "names.json"

MAX_NAMES = 1 << 17
"""Most names, the most frequent ones, from which candidates are drawn, and whose counts are known."""

BLOCK_ROWS = 4096
"""Training samples of a block."""


@lru_cache(1 << 20)
def hash_identifier(name: str) -> int:
    """Return the id of a name: the first eight bytes of its BLAKE2b, as int64."""
    content = name.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def find_names(record: Record) -> list[str]:
    """List the names of a record's text, in order, as Python normalises them. Raises DataError where it has no text."""
    text = unicodedata.normalize("NFKC", get_text(record).decode("utf-8", "replace"))
    return [name for name in NAME.findall(text) if len(name) <= MAX_NAME_CHARACTERS]


class SkipGram(Task):
    """Tells which of some names stands near another; metrics `reciprocal_rank` and `negative_sampling_loss`.

    Args:
        max_distance: Names to each side among which one is drawn for each name.
        num_negatives: Names drawn from all.
        subsample: Share of all names above which a name is left out the more often, the more frequent it is.
    """

    loss_unit = "nats per sample"
    loss_metric = "negative_sampling_loss"
    metric_goals = MappingProxyType({"reciprocal_rank": "maximize", "negative_sampling_loss": "minimize"})
    asset_names = (FILE_NAME,)

    def __init__(
        self,
        *,
        max_distance: Count = 5,
        num_negatives: Annotated[int, Limits(ge=1, le=1000)] = 5,
        subsample: Annotated[float, Limits(ge=1e-6, le=1)] = 1e-3,
    ) -> None:
        self.max_distance = max_distance
        self.num_negatives = num_negatives
        self.subsample = subsample
        self._counts: dict[str, int] = {}
        self._num_names = 0

    def schema(self) -> SampleSchema:
        """Return `center` and `candidates`, the first of which is the one that stands near it."""
        return SampleSchema((Field("center", "int64"), Field("candidates", "int64", (1 + self.num_negatives,))))

    def learn(self, records: Iterable[Record]) -> None:
        """Count the names of the training split. Raises DataError where it has fewer than two."""
        counts = Counter(name for record in records for name in find_names(record))
        if len(counts) < 2:
            what, fix = "the texts have fewer than two names", "add texts, or look at what data.source names"
            raise DataError(what, where="the training split", value=len(counts), fix=fix)
        names = sorted(counts, key=lambda name: (-counts[name], name))[:MAX_NAMES]
        self._counts, self._num_names = {name: counts[name] for name in names}, counts.total()

    def assets(self) -> dict[str, bytes]:
        """Return the names and their counts, the most frequent ones first; none before they were counted."""
        document = {"num_names": self._num_names, "counts": self._counts}
        return {FILE_NAME: json.dumps(document, indent=0).encode()} if self._counts else {}

    def restore(self, assets: Mapping[str, bytes]) -> None:
        """Take over the names of a dataset or an export. Raises ConfigError if there are none."""
        if FILE_NAME not in assets:
            raise ConfigError(f"there is no {FILE_NAME}", where="task", fix="shard again")
        document = json.loads(assets[FILE_NAME])
        self._num_names, self._counts = document["num_names"], document["counts"]

    @cached_property
    def _ids(self) -> np.ndarray:
        """Ids of the names that candidates are drawn from, `[names]`."""
        return np.array([hash_identifier(name) for name in self._counts], np.int64)

    @cached_property
    def _bounds(self) -> np.ndarray:
        """Ends of the names' parts of 0 to 1, `[names]`."""
        weights = np.array(list(self._counts.values()), np.float64) ** 0.75
        return np.cumsum(weights / weights.sum())

    @cached_property
    def _names(self) -> dict[int, str]:
        return dict(zip(self._ids.tolist(), self._counts, strict=True))

    def content_fields(self) -> tuple[str, ...]:
        """Return the field `text`."""
        return ("text",)

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        """Yield blocks of BLOCK_ROWS samples for training, and one per document that has any for validation.

        Raises DataError for a record without text.
        """
        if split == "train":
            yield from self._encode_stream(records)
            return
        for record in records:
            if len(rows := self._draw_rows(record)):
                yield self._build_block(record.key, rows)

    def _encode_stream(self, records: Iterable[Record]) -> Iterator[Block]:
        waiting, number = np.empty((0, 2 + self.num_negatives), np.int64), 0
        for record in records:
            waiting = np.concatenate([waiting, self._draw_rows(record)])
            while len(waiting) >= BLOCK_ROWS:
                yield self._build_block(f"block-{number:06d}", waiting[:BLOCK_ROWS])
                waiting, number = waiting[BLOCK_ROWS:], number + 1
        if len(waiting):
            yield self._build_block(f"block-{number:06d}", waiting)

    def _build_block(self, key: str, rows: np.ndarray) -> Block:
        return Block(key, {"center": rows[:, 0], "candidates": rows[:, 1:]})

    def _draw_rows(self, record: Record) -> np.ndarray:
        """Draw the samples of a text, `[samples, 1 + candidates]`; by its key, whoever encodes it."""
        names = find_names(record)
        random = np.random.default_rng(abs(hash_identifier(record.key)))
        counts = np.array([self._counts.get(name, 1) for name in names], np.float64)
        is_kept = random.random(len(names)) < np.sqrt(self.subsample * self._num_names / np.maximum(counts, 1))
        ids = np.array([hash_identifier(name) for name in names], np.int64)[is_kept]
        if len(ids) < 2:
            return np.empty((0, 2 + self.num_negatives), np.int64)
        places = np.arange(len(ids))
        first = np.maximum(places - self.max_distance, 0)
        near = first + random.integers(0, np.minimum(places + self.max_distance, len(ids) - 1) - first)
        others = ids[near + (near >= places)]  # all places from `first` on but its own
        numbers = np.searchsorted(self._bounds, random.random((len(ids), self.num_negatives)))
        numbers %= len(self._ids)  # a bound may be a little below 1
        is_other = self._ids[numbers] == others[:, np.newaxis]  # no answer were right: its neighbour in the list
        negatives = self._ids[(numbers + is_other) % len(self._ids)]
        return np.concatenate([ids[:, np.newaxis], others[:, np.newaxis], negatives], axis=1)

    def baselines(self, samples: Iterable[Arrays]) -> dict[str, dict[str, float]]:
        """Score two trivial answers: any order, and the more frequent name first."""
        counts = dict(zip(self._ids.tolist(), self._counts.values(), strict=True))
        ranks = []
        for arrays in samples:
            known = [[counts.get(one, 0) for one in row] for row in arrays["candidates"].tolist()]
            ranks.append(_find_reciprocal_rank(np.array(known)))
        if not ranks:
            return {}
        chance = float((1 / np.arange(1, 2 + self.num_negatives)).mean())
        by_count = float(np.concatenate(ranks).mean())
        return {"reciprocal_rank": {"any order": chance, "the more frequent name": by_count}}

    def show(self, block: Arrays) -> Mapping[str, Any]:
        """Show the names of the first sample."""
        center, candidates = int(block["center"][0]), block["candidates"][0].tolist()
        names = [self._names.get(one, "(a rare name)") for one in (center, *candidates)]
        return {"name": names[0], "near it": names[1], "drawn from all": " ".join(names[2:])}

    def loss(self, output: Any, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Sum over rows whose weight is not 0 what negative sampling minimises, in nats."""
        return (_sample_losses(output.float()) * weight).sum()

    def statistics(self, output: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return per row `count` (1), `negative_sampling_loss` in nats, and `reciprocal_rank` of the right candidate.

        Candidates whose log-odds are equal have the mean of their places.
        """
        import torch

        logits = output.double()
        losses, scores = _sample_losses(logits), logits.nan_to_num().cpu().numpy()
        return {
            "count": losses.new_ones(len(losses)),
            "negative_sampling_loss": losses,
            "reciprocal_rank": torch.from_numpy(_find_reciprocal_rank(scores)).to(logits.device),
        }

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute the means over samples."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return {name: np.asarray(sums[name]) / sums["count"] for name in self.metric_goals}

    def input_example(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return two names that stand near each other, where both are known."""
        names = [self._names.get(int(one)) for one in (sample["center"], sample["candidates"].reshape(-1)[0])]
        return dict(zip(("identifier", "other"), names, strict=True)) if None not in names else {}

    def answer(self, output: Any) -> dict[str, torch.Tensor]:
        """Return the `log_odds` of `other` near `identifier`, against names that are drawn from all."""
        return {"log_odds": output[:, 0].double()}

    def answer_types(self) -> dict[str, str]:
        """Return `double` for the column of `answer`."""
        return {"log_odds": "double"}

    def predict(self, model: torch.nn.Module, inputs: pandas.DataFrame) -> pandas.DataFrame:
        """Answer each row of names `identifier` and `other` by the columns of `answer`. Raises DataError."""
        ids = []
        for column in ("identifier", "other"):
            names = inputs[column].tolist() if column in inputs and inputs[column].ndim == 1 else [None]
            texts = [unicodedata.normalize("NFKC", name) for name in names if isinstance(name, str)]
            if len(texts) < len(names):
                what, fix = f"the input needs a column '{column}' of names", "give each row two texts"
                raise DataError(what, where="predict", value=names[:5], fix=fix)
            ids.append([hash_identifier(text) for text in texts])
        width = 1 + self.num_negatives
        columns = {"center": ids[0], "candidates": [[other] * width for other in ids[1]]}
        return super().predict(model, type(inputs)(columns, index=inputs.index))


def _sample_losses(logits: torch.Tensor) -> torch.Tensor:
    """Return the sum of the logistic losses of a row's candidates, `[rows]`; the first one is right."""
    from torch.nn.functional import softplus

    return softplus(-logits[:, 0]) + softplus(logits[:, 1:]).sum(1)


def _find_reciprocal_rank(scores: np.ndarray) -> np.ndarray:
    """Return 1 / the rank of each row's first score, `[rows]`, of `[rows, scores]`; equal ones have their mean."""
    sums = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, scores.shape[1] + 1))])
    num_above, num_equal = ((other(scores[:, 1:], scores[:, :1])).sum(1) for other in (np.greater, np.equal))
    reciprocal: np.ndarray = (sums[num_above + num_equal + 1] - sums[num_above]) / (num_equal + 1)
    return reciprocal
