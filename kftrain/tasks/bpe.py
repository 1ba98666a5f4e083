"""Byte-level BPE through Hugging Face's `tokenizers`: the tokenizer that encodes, and its training.

The library takes text, documents are bytes: what is no UTF-8 in them becomes the ids of single bytes. Long documents
are encoded in pieces, because the library keeps many times a text's size while it works on it.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kftrain.core import storage
from kftrain.errors import ConfigError, DataError
from kftrain.tasks import tokenizer_json
from kftrain.tasks.tokenizers import Tokenizer

PIECE_CHARACTERS = 1 << 20
"""Longest text that is encoded at once."""

PANIC = "PanicException"
"""Name of the library's own failure, for example for a pattern that would try for ever."""

_NO_TEXT = re.compile("[\udc80-\udcff]+")
"""Bytes that are no UTF-8, as `surrogateescape` decodes them."""

_BOUNDARY = re.compile(r"(?<=\S\n)(?=[^\W\d_])")
"""A line's end before a letter: no usual pre-tokenizer makes one token of what stands on both sides."""


class BytePairTokenizer(Tokenizer):
    """Tokenizer of a `tokenizer.json` that `clean_tokenizer` has made."""

    def __init__(self, content: bytes) -> None:
        """Load the content of the file. Raises ConfigError for other content, or without the package `tokenizers`."""
        self._content = content
        try:
            document = json.loads(content)
            self._texts = tokenizer_json.texts_of_ids(document)
            self.document = tokenizer_json.document_id(document)
            self.padding = tokenizer_json.special_id(document, tokenizer_json.PADDING)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError, StopIteration) as error:
            what = f"no tokenizer of this project: {error!r}"
            raise ConfigError(what, where=tokenizer_json.FILE_NAME, fix="shard the data again") from error
        self._encoder = _build_encoder(content)
        self._byte_ids = {text[0]: number for number, text in enumerate(self._texts) if len(text) == 1}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._content,)

    @property
    def content(self) -> bytes:
        """Content of the `tokenizer.json`."""
        return self._content

    @property
    def num_ids(self) -> int:
        """Number of ids: one more than the largest."""
        return len(self._texts)

    @functools.cached_property
    def digest(self) -> str:
        """Hex sha256 of `content`."""
        return storage.sha256_bytes(self._content)

    def to_dict(self) -> dict[str, Any]:
        """Return the digest of the file, and its special ids and sizes."""
        return {
            "sha256": self.digest,
            "document": self.document,
            "padding": self.padding,
            "vocab_size": self.vocab_size,
        }

    @functools.cached_property
    def bytes_per_id(self) -> np.ndarray:
        """Bytes of text that each id stands for, int64 `[vocab_size]`."""
        lengths = np.zeros(self.vocab_size, np.int64)
        lengths[: self.num_ids] = [len(text) for text in self._texts]
        return lengths

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a text. Raises DataError if they would not decode to the same bytes."""
        ids: list[int] = []
        for is_text, run in _cut_runs(text.decode("utf-8", "surrogateescape")):
            ids += self._encode_run(run) if is_text else self._encode_bytes(run.encode("utf-8", "surrogateescape"))
        if b"".join(map(self._texts.__getitem__, ids)) != text:
            what = "the tokenizer changes this text, so its bytes could not be counted"
            raise DataError(what, value=f"{text[:60]!r}", fix="use one that keeps texts as they are, or bytes")
        return np.array(ids, self.dtype)

    def decode(self, tokens: np.ndarray) -> bytes:
        """Return the joined texts of ids; ids beyond the vocabulary have none."""
        return b"".join(self._texts[number] for number in np.asarray(tokens).tolist() if number < self.num_ids)

    def _encode_run(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:  # the library's panics derive from BaseException and cannot be imported
            if type(error).__name__ != PANIC:
                raise
            what = f"the tokenizer cannot split this text: {error}"
            raise DataError(what, value=f"{text[:60]!r}", fix="use another pattern in its pre-tokenizer") from error
        return ids

    def _encode_bytes(self, content: bytes) -> list[int]:
        try:
            return [self._byte_ids[byte] for byte in content]
        except KeyError as error:
            what = f"the tokenizer has no id for the byte {error}, which is no UTF-8"
            raise DataError(what, fix="use one whose vocabulary has every byte") from error


def train_bpe(texts: Iterable[bytes], vocab_size: int, sample_bytes: int) -> BytePairTokenizer:
    """Train a byte-level BPE of at most `vocab_size` ids, special ones included, on the first `sample_bytes` of text.

    The same texts give the same tokenizer with the same release of `tokenizers`: of equally frequent pairs the one with
    the lowest ids is merged first. Memory holds the different words of the texts. Raises DataError without a text.
    """
    library = _import_library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - tokenizer_json.NUM_SPECIAL,
        initial_alphabet=list(tokenizer_json.byte_characters()),
        special_tokens=[],
        show_progress=False,
    )
    sample = _sample_texts(texts, sample_bytes)
    first = next(sample, None)
    if first is None:
        raise DataError("there is no text to train a tokenizer on", where="task.tokenizer", fix="add documents")
    tokenizer.train_from_iterator(itertools.chain([first], sample), trainer)
    return BytePairTokenizer(tokenizer_json.clean_tokenizer(tokenizer.to_str().encode()))


def _sample_texts(texts: Iterable[bytes], sample_bytes: int) -> Iterator[str]:
    """Yield the first bytes of text, in pieces; bytes that are no UTF-8 are left out, as no words are made of them."""
    left = sample_bytes
    for text in texts:
        if left <= 0:
            return
        head = text[:left]
        left -= len(head)
        for start in range(0, len(head), PIECE_CHARACTERS):
            yield head[start : start + PIECE_CHARACTERS].decode("utf-8", "ignore")


def _cut_runs(text: str) -> Iterator[tuple[bool, str]]:
    """Cut a text into runs: (True, text) and (False, bytes that are no UTF-8), in order."""
    done = 0
    for run in _NO_TEXT.finditer(text):
        yield from ((True, piece) for piece in _cut_pieces(text[done : run.start()]))
        yield False, run[0]
        done = run.end()
    yield from ((True, piece) for piece in _cut_pieces(text[done:] if done else text))


def _cut_pieces(text: str) -> Iterator[str]:
    """Cut a long text into pieces, at the end of a word if there is one in the second half of a piece."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        boundary = _BOUNDARY.search(text, start + PIECE_CHARACTERS // 2, end)
        stop = boundary.start() if boundary else end
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:] if start else text


def _build_encoder(content: bytes) -> Any:
    library = _import_library()
    try:
        encoder = library.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library has no type of its own
        what = f"the package tokenizers cannot read it: {error}"
        raise ConfigError(
            what, where=tokenizer_json.FILE_NAME, fix="save it with a release that is installed"
        ) from error
    encoder.encode_special_tokens = True  # a document that mentions a special token has its bytes
    return encoder


def _import_library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the package tokenizers is needed for any tokenizer but bytes",
            where="task.tokenizer",
            fix="pip install 'kftrain[sources]', or 'kftrain[train]' where it trains",
        ) from error
    return tokenizers
