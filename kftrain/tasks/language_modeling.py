"""Next-token prediction over documents of text.

Training packs: documents are joined into one stream and cut into rows of `sequence_length` + 1 tokens that
overlap by one, so that every token but the stream's first is a target exactly once and nothing is dropped;
only the last row has padding.

Validation does not pack: each document is a block of its own, cut the same way, its last row padded. A
document's bits then depend on that document alone, which makes documents the independent units that the
bootstrap resamples.

Bits are counted over bytes only (not over the ids that start documents), so figures compare across tokenizers
and models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import log
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.data.schema import Arrays, Block, Field, Record, SampleSchema
from kftrain.errors import DataError
from kftrain.models.output import output_of
from kftrain.settings.section import Count
from kftrain.tasks.base import Task
from kftrain.tasks.compression import MAX_BYTES, compression_baselines
from kftrain.tasks.tokenizers import build_tokenizer

if TYPE_CHECKING:
    import pandas
    import torch

    from kftrain.tasks.base import Batch

ROWS_PER_BLOCK = 256
"""Rows of a training block: large enough that a tar's headers do not count, small enough to shuffle."""

MAX_CONTINUED_TOKENS = 32
"""How far `examples` lets the model write; each token is one forward pass of a few rows."""

MAX_SHOWN_BYTES = 96
"""Of the text before that."""

MAX_SLICES = 12
"""Slices that are named; the smaller ones are counted together as `other`."""


class LanguageModeling(Task):
    """Predicts the next token of documents; metrics `bits_per_byte` and `accuracy` (share of bytes guessed right).

    Args:
        sequence_length: Tokens that the model sees at once.
        tokenizer: `bytes`.
    """

    input_column = "text"
    predict_batch_rows = 32
    sequence_dims = MappingProxyType({"inputs": 1, "targets": 1})
    loss_unit = "nats per token"
    loss_metric = "bits_per_byte"

    def __init__(self, *, sequence_length: Count = 256, tokenizer: str = "bytes") -> None:
        self.sequence_length = sequence_length
        self.tokenizer = build_tokenizer(tokenizer)

    def schema(self) -> SampleSchema:
        """`tokens` `[sequence_length + 1]`: inputs are all but the last, targets all but the first."""
        return SampleSchema((Field("tokens", self.tokenizer.dtype, (self.sequence_length + 1,)),))

    def settings(self) -> dict[str, Any]:
        """What the encoded bytes depend on."""
        return {
            "task": "language_modeling",
            "sequence_length": self.sequence_length,
            "rows_per_block": ROWS_PER_BLOCK,
            "tokenizer": self.tokenizer.to_dict(),
            "tokenizer_digest": self.tokenizer.digest,
        }

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        """Training: blocks `block-000000` … of packed rows. Validation: one block per non-empty document.

        Raises DataError for a record without text.
        """
        if split == "train":
            yield from self._pack(records)
            return
        for record in records:
            text = text_of(record)
            if text:
                yield Block(record.key, {"tokens": self._rows_of_document(text)})

    def baselines(self, records: Iterable[Record]) -> dict[str, dict[str, float]]:
        """Bits per byte of zlib and of an adaptive order-2 context model on the same documents, joined."""
        joined = bytearray()
        for record in records:
            joined += text_of(record)
            if len(joined) >= MAX_BYTES:
                break
        figures = compression_baselines(bytes(joined))
        return {"bits_per_byte": figures} if figures else {}

    def model_arguments(self) -> dict[str, Any]:
        """Vocabulary, longest input and the id that starts a document."""
        return {
            "vocab_size": self.tokenizer.vocab_size,
            "sequence_length": self.sequence_length,
            "document_token": self.tokenizer.document,
        }

    def count_terms(self, arrays: Arrays) -> np.ndarray:
        """Targets of each row that are not padding, `[rows]` int64."""
        terms: np.ndarray = (arrays["tokens"][:, 1:] != self.tokenizer.padding).sum(axis=1, dtype=np.int64)
        return terms

    def batch(self, arrays: Arrays) -> Batch:
        """`inputs` and `targets`, each `[rows, sequence_length]` int64."""
        import torch

        tokens = torch.from_numpy(arrays["tokens"].astype(np.int64))
        return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def inputs(self, batch: Batch) -> tuple[torch.Tensor]:
        """The tokens before the last; the model gives logits `[rows, sequence_length, vocab_size]`."""
        return (batch["inputs"],)

    def loss(self, output: Any, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Summed cross-entropy in nats over targets that are not padding, in rows whose weight is not 0."""
        import torch.nn.functional as F  # noqa: N812 - the name that everybody uses

        targets = batch["targets"].masked_fill((weight == 0).unsqueeze(1), self.tokenizer.padding)
        return F.cross_entropy(
            output.float().flatten(0, 1), targets.flatten(), ignore_index=self.tokenizer.padding, reduction="sum"
        )

    def statistics(self, output: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Per row: `bits` of its bytes, their number `bytes`, and how many were guessed right, `correct`."""
        import torch

        targets = batch["targets"]
        is_byte = targets < self.tokenizer.num_bytes
        logits = output.float()
        log_probabilities = torch.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        bits = -log_probabilities.double().masked_fill(~is_byte, 0.0).sum(dim=1) / log(2)
        correct = ((logits.argmax(dim=-1) == targets) & is_byte).sum(dim=1)
        return {"bits": bits, "bytes": is_byte.sum(dim=1).double(), "correct": correct.double()}

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Bits per byte and accuracy; not a number where there are no bytes."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "bits_per_byte": np.asarray(sums["bits"]) / sums["bytes"],
                "accuracy": np.asarray(sums["correct"]) / sums["bytes"],
            }

    def slice_names(self, keys: list[str], statistics: Mapping[str, np.ndarray]) -> list[str]:
        """The first folder of each key; the largest dozen by bytes keep their names."""
        folders = [key.split("/", 1)[0] if "/" in key else "(top)" for key in keys]
        sizes: Counter[str] = Counter()
        for folder, num_bytes in zip(folders, statistics["bytes"], strict=True):
            sizes[folder] += int(num_bytes)
        if len(sizes) == 1:
            return ["all"] * len(keys)
        by_size = sorted(sizes, key=lambda folder: (-sizes[folder], folder))
        named = set(by_size if len(by_size) <= MAX_SLICES else by_size[: MAX_SLICES - 1])
        return [folder if folder in named else "other" for folder in folders]

    def examples(self, model: torch.nn.Module, arrays: Arrays, batch: Batch) -> list[Mapping[str, Any]]:
        """Text of each row up to its middle, how it goes on, and how the model does, always with the likeliest byte."""
        import torch

        num_continued = max(1, min(MAX_CONTINUED_TOKENS, self.sequence_length // 2))
        num_tokens = (arrays["tokens"] != self.tokenizer.padding).sum(axis=1)
        starts = np.clip(num_tokens // 2, 1, max(1, self.sequence_length // 2))
        tokens = torch.cat([batch["inputs"], batch["targets"][:, -1:]], dim=1)
        rows, places = torch.arange(len(tokens), device=tokens.device), torch.from_numpy(starts).to(tokens.device)
        tokens[torch.arange(tokens.shape[1], device=tokens.device) >= places.unsqueeze(1)] = self.tokenizer.padding
        for _ in range(num_continued):
            logits = output_of(model, (tokens[:, :-1],))[rows, places - 1]
            tokens[rows, places] = logits[:, : self.tokenizer.num_bytes].float().argmax(dim=-1)
            places = places + 1
        return [
            {
                "text": self._shown(row[:start])[-MAX_SHOWN_BYTES:],
                "goes on": self._shown(row[start : start + num_continued]),
                "the model writes": self._shown(written[start : min(start + num_continued, end)]),
            }
            for row, start, end, written in zip(arrays["tokens"], starts, num_tokens, tokens.cpu().numpy(), strict=True)
        ]

    def _shown(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(tokens).decode("utf-8", "replace")

    def predict(self, model: torch.nn.Module, inputs: pandas.DataFrame) -> pandas.DataFrame:
        """`bits_per_byte` and `num_bytes` of each row's `text`, computed as evaluation computes a document.

        An empty text has no bits per byte (not a number). Raises DataError without a column `text` or for a
        row without text.
        """
        import pandas

        if "text" not in inputs:
            raise DataError("the input needs a column 'text'", where="predict", value=list(inputs.columns))
        sums = [
            self._score(model, text_of(Record(f"row {index}", {"text": text})))
            for index, text in zip(inputs.index, inputs["text"], strict=True)
        ]
        return pandas.DataFrame(
            {
                "bits_per_byte": [float(self.metrics(each)["bits_per_byte"]) for each in sums],
                "num_bytes": [int(each["bytes"]) for each in sums],
            },
            index=inputs.index,
        )

    def _pack(self, records: Iterable[Record]) -> Iterator[Block]:
        rows = self._packed_rows(self.tokenizer.encode_document(text_of(record)) for record in records)
        for number in range(1 << 62):
            block = list(islice(rows, ROWS_PER_BLOCK))
            if not block:
                return
            yield Block(f"block-{number:06d}", {"tokens": np.stack(block)})

    def _packed_rows(self, documents: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Rows `[sequence_length + 1]` of the joined stream; memory for one document and one row."""
        rest = np.empty(0, dtype=self.tokenizer.dtype)
        for document in documents:
            stream = np.concatenate([rest, document])
            num_rows = max(0, len(stream) - 1) // self.sequence_length
            yield from self._cut(stream[: num_rows * self.sequence_length + 1]) if num_rows else ()
            rest = stream[num_rows * self.sequence_length :]
        if len(rest) > 1:
            yield from self._cut(rest)

    def _rows_of_document(self, text: bytes) -> np.ndarray:
        return self._cut(self.tokenizer.encode_document(text))

    def _cut(self, stream: np.ndarray) -> np.ndarray:
        """Rows `[rows, sequence_length + 1]` that overlap by one token, the last one padded."""
        num_rows = -(-(len(stream) - 1) // self.sequence_length)
        padded = np.full(num_rows * self.sequence_length + 1, self.tokenizer.padding, dtype=stream.dtype)
        padded[: len(stream)] = stream
        starts = np.arange(num_rows)[:, np.newaxis] * self.sequence_length
        rows: np.ndarray = padded[starts + np.arange(self.sequence_length + 1)]
        return rows

    def _score(self, model: torch.nn.Module, text: bytes) -> dict[str, np.ndarray]:
        """Sums of `statistics` over the rows of one document."""
        from kftrain.tasks.inference import map_rows

        if not text:
            return {name: np.zeros(()) for name in ("bits", "bytes", "correct")}
        rows = {"tokens": self._rows_of_document(text)}
        return {name: values.sum(axis=0) for name, values in map_rows(self, model, rows, self.statistics).items()}


def text_of(record: Record) -> bytes:
    """The field `text` of a record as bytes. Raises DataError where it is missing or no text."""
    text = record.fields.get("text")
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    raise DataError("a record needs a field 'text' of bytes or str", where=record.key, value=text)
