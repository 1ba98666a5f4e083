"""Next-token prediction over documents of text.

Training packs: documents are joined into one stream of tokens, which the shards hold. It is cut when it is read, into
rows of `sequence_length` + 1 tokens that overlap by one, so that every token but the stream's first is a target exactly
once and nothing is dropped; only the last row has padding.

Validation does not pack: each document stays text, becomes tokens when it is read, and is cut the same way, its last
row padded. A document's bits then depend on that document alone, which makes documents the independent units that the
bootstrap resamples; and models of any tokenizer are measured on the same documents.

Bits and guesses are counted per byte of text (the ids that start documents have none), so figures compare across
tokenizers and models.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import log
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kftrain.data.schema import BYTES, Arrays, Block, Field, Record, SampleSchema, Window
from kftrain.errors import ConfigError, DataError
from kftrain.models.output import output_of
from kftrain.settings.section import Count
from kftrain.tasks import tokenizer_json
from kftrain.tasks.base import Task, reads_parts
from kftrain.tasks.tokenizers import Tokenizer, UntrainedTokenizer, build_tokenizer, parse_option

if TYPE_CHECKING:
    import pandas
    import torch

    from kftrain.tasks.base import Batch

TOKENS_PER_BLOCK = 1 << 16
"""Tokens per training block: so many that a tar's headers do not count, and few samples cross a block's end."""

MAX_BASELINE_BYTES = 4 << 20
"""Most bytes that baselines look at, the first ones, so that they cost seconds whatever the data."""

MAX_CONTINUED_TOKENS = 32
"""Tokens that `examples` lets the model write; each costs one forward pass of a few rows."""

MAX_SHOWN_BYTES = 96
"""Length of the text that an example shows before what the model writes."""

MAX_BITS_PER_TOKEN = 1000.0
"""Largest value that enters the perplexity: 2 to the power of more is no finite number."""

MAX_EXAMPLE_CHARACTERS = 200
"""Longest example that is registered with a model."""

MAX_SLICES = 12
"""Slices that are named; the smaller ones are counted together as `other`."""


class LanguageModeling(Task):
    """Predicts the next token of documents; metrics `bits_per_byte` and `accuracy` (share of bytes guessed right).

    Args:
        sequence_length: Tokens that the model sees at once.
        tokenizer: `bytes`; the URI of a `tokenizer.json`; or `{train: {vocab_size: 4096}}`, which trains a byte-level
            BPE on the training split in the shard step.
        attention: `rows`: to all tokens before it in its row; `documents`: to those of its own document, where
            positions begin anew. The model must know it, as the built-in transformer does.
    """

    input_column = "text"
    reading_options = frozenset({"sequence_length", "tokenizer", "attention"})
    predict_batch_rows = 32
    sequence_dims = MappingProxyType({"inputs": 1, "targets": 1})
    loss_unit = "nats per token"
    loss_metric = "bits_per_byte"
    metric_goals = MappingProxyType({"bits_per_byte": "minimize", "accuracy": "maximize", "perplexity": "minimize"})

    def __init__(
        self,
        *,
        sequence_length: Count = 256,
        tokenizer: str | dict[str, Any] = "bytes",
        attention: Literal["rows", "documents"] = "rows",
    ) -> None:
        self.sequence_length = sequence_length
        self.attention = attention
        self._wanted = parse_option(tokenizer)
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the dataset or the export, or else the one that the options ask for.

        Raises ConfigError if that is a file that cannot be read.
        """
        if self._tokenizer is None:
            self._tokenizer = build_tokenizer(self._wanted)
        return self._tokenizer

    def schema(self) -> SampleSchema:
        """Return the field `tokens`: one token of a stream, which `window` says how to cut."""
        return SampleSchema((Field("tokens", self.tokenizer.dtype),))

    def validation_schema(self) -> SampleSchema:
        """Return the field `text`: a whole document in UTF-8."""
        return SampleSchema((Field("text", BYTES, (), ("txt",)),))

    @property
    def window(self) -> Window:
        """Cut into rows `[sequence_length + 1]`: inputs are all tokens but the last, targets all but the first."""
        return Window(self.sequence_length + 1, self.sequence_length, {"tokens": self.tokenizer.padding})

    def settings(self) -> dict[str, Any]:
        """Return what the encoded bytes depend on; the length of the model's inputs is not among it."""
        return {
            "task": "language_modeling",
            "tokens_per_block": TOKENS_PER_BLOCK,
            "tokenizer": self.tokenizer.to_dict(),
            "tokenizer_digest": self.tokenizer.digest,
        }

    def learn(self, records: Iterable[Record]) -> None:
        """Train the tokenizer, if that is asked for and there is none yet. Raises DataError without a text."""
        options = self._wanted.train if self._wanted else None
        if options is None or self.assets():
            return
        from kftrain.tasks.bpe import train_bpe

        self._tokenizer = train_bpe(map(get_text, records), options.vocab_size, options.sample_bytes)

    @property
    def asset_names(self) -> tuple[str, ...]:
        """Name of the tokenizer's file; none for bytes."""
        return () if self._wanted is None else (tokenizer_json.FILE_NAME,)

    def assets(self) -> dict[str, bytes]:
        """Return the tokenizer's file; none for bytes, or before the tokenizer is trained."""
        is_known = self._wanted is not None and not isinstance(self.tokenizer, UntrainedTokenizer)
        return {tokenizer_json.FILE_NAME: self.tokenizer.content} if is_known else {}

    def restore(self, assets: Mapping[str, bytes]) -> None:
        """Take over the tokenizer of a dataset or an export. Raises ConfigError if there is none."""
        if self._wanted is None:
            return
        if tokenizer_json.FILE_NAME not in assets:
            raise ConfigError(f"there is no {tokenizer_json.FILE_NAME}", where="task.tokenizer", fix="shard again")
        from kftrain.tasks.bpe import BytePairTokenizer

        self._tokenizer = BytePairTokenizer(assets[tokenizer_json.FILE_NAME])

    def export_files(self) -> dict[str, bytes]:
        """Return the files that `transformers.AutoTokenizer` loads; it puts the document's id before each text."""
        content = self.tokenizer.content
        configuration = tokenizer_json.make_tokenizer_config(content, self.sequence_length)
        return {tokenizer_json.FILE_NAME: content, tokenizer_json.CONFIG_NAME: configuration}

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        """Yield blocks of a stream of tokens for training, and one block per non-empty document for validation.

        Raises DataError for a record without text.
        """
        if split == "train":
            yield from self._encode_stream(records)
            return
        for record in records:
            text = get_text(record)
            if text:
                content = np.empty(1, object)
                content[0] = text
                yield Block(record.key, {"text": content})

    def rows(self, sample: Mapping[str, Any]) -> Arrays | None:
        """Cut a document into rows `[k, sequence_length + 1]`; None for a sample that is a row already."""
        return {"tokens": self._cut_document(bytes(sample["text"]))} if "text" in sample else None

    def content_fields(self) -> tuple[str, ...]:
        """Return the field `text`."""
        return ("text",)

    def baselines(self, samples: Iterable[Arrays]) -> dict[str, dict[str, float]]:
        """Return bits per byte of zlib and of LZMA (xz) on the same documents, joined.

        LZMA is missing where Python was built without it.
        """
        joined = bytearray()
        for arrays in samples:
            joined += bytes(arrays["text"][0])
            if len(joined) >= MAX_BASELINE_BYTES:
                break
        content = bytes(joined[:MAX_BASELINE_BYTES])
        if not content:
            return {}
        compressed = {"zlib -9": zlib.compress(content, level=9)}
        with contextlib.suppress(ImportError):
            import lzma

            compressed["xz -9"] = lzma.compress(content, preset=9)
        return {"bits_per_byte": {name: 8 * len(packed) / len(content) for name, packed in compressed.items()}}

    def show(self, block: Arrays) -> Mapping[str, Any]:
        """Show the beginning of the text."""
        return {"text": self._decode_text(block["tokens"].ravel())} if "tokens" in block else super().show(block)

    def model_arguments(self) -> dict[str, Any]:
        """Return the vocabulary, the longest input, the id that starts a document, and attention within documents."""
        return {
            "vocab_size": self.tokenizer.vocab_size,
            "sequence_length": self.sequence_length,
            "document_token": self.tokenizer.document,
            **({} if self.attention == "rows" else {"attention": self.attention}),
        }

    def count_terms(self, arrays: Arrays) -> np.ndarray:
        """Count the targets of each row that are not padding, `[rows]` int64."""
        terms: np.ndarray = (arrays["tokens"][:, 1:] != self.tokenizer.padding).sum(axis=1, dtype=np.int64)
        return terms

    def batch(self, arrays: Arrays) -> Batch:
        """Make `inputs` and `targets`, each `[rows, sequence_length]` int64."""
        import torch

        tokens = torch.from_numpy(arrays["tokens"].astype(np.int64))
        return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def inputs(self, batch: Batch) -> tuple[torch.Tensor]:
        """Return the tokens before the last; the model gives logits `[rows, sequence_length, vocab_size]`."""
        return (batch["inputs"],)

    @reads_parts
    def loss(self, output: Any, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Sum the cross-entropy in nats over targets that are not padding, in rows whose weight is not 0."""
        import torch
        import torch.nn.functional as F  # noqa: N812 - the name that everybody uses

        targets = batch["targets"].masked_fill((weight == 0).unsqueeze(1), self.tokenizer.padding)
        if not isinstance(output, torch.Tensor):
            total: torch.Tensor = output.sum_cross_entropy(targets, self.tokenizer.padding)
            return total
        return F.cross_entropy(
            output.float().flatten(0, 1), targets.flatten(), ignore_index=self.tokenizer.padding, reduction="sum"
        )

    @reads_parts
    def statistics(self, output: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return per row `bits` of its bytes, their number `bytes`, the rightly guessed `correct`, and `tokens`.

        For `correct` a token counts as the bytes that it stands for; one that stands for none is none of `tokens`.
        """
        import torch

        targets = batch["targets"]
        num_bytes = torch.from_numpy(self.tokenizer.bytes_per_id).to(targets.device)[targets]
        if isinstance(output, torch.Tensor):
            logits = output.float()
            log_probabilities = torch.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            guesses = logits.argmax(dim=-1)
        else:
            losses, guesses = output.score(targets)
            log_probabilities = -losses
        bits = -log_probabilities.double().masked_fill(num_bytes == 0, 0.0).sum(dim=1) / log(2)
        correct = ((guesses == targets) * num_bytes).sum(dim=1)
        return {
            "bits": bits,
            "bytes": num_bytes.sum(dim=1).double(),
            "correct": correct.double(),
            "tokens": (num_bytes > 0).sum(dim=1).double(),
        }

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute bits per byte, accuracy, and perplexity per token; NaN without bytes.

        Perplexities of models with different tokenizers cannot be compared. Sums of earlier releases have no `tokens`,
        and so no perplexity.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            metrics = {
                "bits_per_byte": np.asarray(sums["bits"]) / sums["bytes"],
                "accuracy": np.asarray(sums["correct"]) / sums["bytes"],
            }
            if "tokens" in sums:
                bits_per_token = np.asarray(sums["bits"]) / sums["tokens"]
                metrics["perplexity"] = np.exp2(np.minimum(bits_per_token, MAX_BITS_PER_TOKEN))
        return metrics

    def slice_names(self, keys: list[str], statistics: Mapping[str, np.ndarray]) -> list[str]:
        """Name the first folder of each key as its slice; only the largest dozen by bytes keep their names."""
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
        """Show each row's text up to its middle, how it goes on, and what the model writes, greedily, instead."""
        import torch

        num_continued = max(1, min(MAX_CONTINUED_TOKENS, self.sequence_length // 2))
        num_tokens = (arrays["tokens"] != self.tokenizer.padding).sum(axis=1)
        starts = np.clip(num_tokens // 2, 1, max(1, self.sequence_length // 2))
        tokens = torch.cat([batch["inputs"], batch["targets"][:, -1:]], dim=1)
        is_special = torch.from_numpy(self.tokenizer.bytes_per_id == 0).to(tokens.device)
        rows, places = torch.arange(len(tokens), device=tokens.device), torch.from_numpy(starts).to(tokens.device)
        tokens[torch.arange(tokens.shape[1], device=tokens.device) >= places.unsqueeze(1)] = self.tokenizer.padding
        for _ in range(num_continued):
            logits = output_of(model, (tokens[:, :-1],))[rows, places - 1]
            tokens[rows, places] = logits.float().masked_fill(is_special, -torch.inf).argmax(dim=-1)
            places = places + 1
        return [
            {
                "text": self._decode_text(row[:start])[-MAX_SHOWN_BYTES:],
                "goes on": self._decode_text(row[start : start + num_continued]),
                "the model writes": self._decode_text(written[start : min(start + num_continued, end)]),
            }
            for row, start, end, written in zip(arrays["tokens"], starts, num_tokens, tokens.cpu().numpy(), strict=True)
        ]

    def _decode_text(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(tokens).decode("utf-8", "replace")

    def input_example(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the beginning of a document as `text`."""
        text = bytes(sample["text"]).decode(errors="replace") if "text" in sample else ""
        return {"text": text[:MAX_EXAMPLE_CHARACTERS]} if text else {}

    def answer_types(self) -> dict[str, str]:
        """Return the types of the two columns of `predict`."""
        return {"bits_per_byte": "double", "num_bytes": "long"}

    def predict(self, model: torch.nn.Module, inputs: pandas.DataFrame) -> pandas.DataFrame:
        """Score each row's `text` as evaluation scores a document: `bits_per_byte` and `num_bytes`.

        An empty text has NaN bits per byte. Raises DataError without a column `text` or for a row without text.
        """
        import pandas

        if "text" not in inputs:
            raise DataError("the input needs a column 'text'", where="predict", value=list(inputs.columns))
        sums = [
            self._score(model, get_text(Record(f"row {index}", {"text": text})))
            for index, text in zip(inputs.index, inputs["text"], strict=True)
        ]
        return pandas.DataFrame(
            {
                "bits_per_byte": [float(self.metrics(row)["bits_per_byte"]) for row in sums],
                "num_bytes": [int(row["bytes"]) for row in sums],
            },
            index=inputs.index,
        )

    def _encode_stream(self, records: Iterable[Record]) -> Iterator[Block]:
        """Yield blocks of `TOKENS_PER_BLOCK` tokens, the last one shorter; memory holds one document and one block."""
        waiting: list[np.ndarray] = []
        num_waiting = number = 0
        for record in records:
            waiting.append(self._encode_document(record))
            num_waiting += len(waiting[-1])
            if num_waiting < TOKENS_PER_BLOCK:
                continue
            joined = np.concatenate(waiting)
            num_waiting %= TOKENS_PER_BLOCK
            waiting = [joined[len(joined) - num_waiting :].copy()]
            for block in joined[: len(joined) - num_waiting].reshape(-1, TOKENS_PER_BLOCK):
                yield Block(f"block-{number:06d}", {"tokens": block})
                number += 1
        if num_waiting:
            yield Block(f"block-{number:06d}", {"tokens": np.concatenate(waiting)})

    def _encode_document(self, record: Record) -> np.ndarray:
        try:
            return self.tokenizer.encode_document(get_text(record))
        except DataError as error:
            raise DataError(error.what, where=record.key, value=error.value, fix=error.fix) from error

    def _cut_document(self, text: bytes) -> np.ndarray:
        """Cut a document into rows `[rows, sequence_length + 1]` that overlap by one token, the last one padded."""
        stream = self.tokenizer.encode_document(text)
        num_rows = max(1, -(-(len(stream) - 1) // self.sequence_length))
        padded = np.full(num_rows * self.sequence_length + 1, self.tokenizer.padding, dtype=stream.dtype)
        padded[: len(stream)] = stream
        starts = np.arange(num_rows)[:, np.newaxis] * self.sequence_length
        rows: np.ndarray = padded[starts + np.arange(self.sequence_length + 1)]
        return rows

    def _score(self, model: torch.nn.Module, text: bytes) -> dict[str, np.ndarray]:
        """Sum `statistics` over the rows of one document."""
        from kftrain.tasks.inference import map_rows

        if not text:
            return {name: np.zeros(()) for name in ("bits", "bytes", "correct", "tokens")}
        rows = {"tokens": self._cut_document(text)}
        return {name: values.sum(axis=0) for name, values in map_rows(self, model, rows, self.statistics).items()}


def get_text(record: Record) -> bytes:
    """Return the field `text` of a record as bytes. Raises DataError if it is missing or no text."""
    text = record.fields.get("text")
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    raise DataError("a record needs a field 'text' of bytes or str", where=record.key, value=text)
