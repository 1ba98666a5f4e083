"""Byte-level BPE through Hugging Face's `tokenizers`: what encodes, and how one is trained.

The library takes text, documents are bytes: what is no UTF-8 in them becomes the ids of single bytes. Long documents
are encoded in pieces, because the library keeps many times a text's size while it works on it.
"""

from __future__ import annotations

import functools
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
"""What a failure of the library's own is called, such as a pattern that would try for ever."""

_NO_TEXT = re.compile("[\udc80-\udcff]+")
"""Bytes that are no UTF-8, as `surrogateescape` decodes them."""

_BOUNDARY = re.compile(r"(?<=\S\n)(?=[^\W\d_])")
"""Where no usual pre-tokenizer joins what stands before to what stands behind: a line's end before a letter."""


class BytePairTokenizer(Tokenizer):
    """A `tokenizer.json` as `tokenizer_json.kept` gives it."""

    def __init__(self, content: bytes) -> None:
        """Raises ConfigError for other content, or where the package `tokenizers` is missing."""
        self._content = content
        try:
            document = json.loads(content)
            self._texts = tokenizer_json.texts_of_ids(document)
            self.document = tokenizer_json.document_id(document)
            self.padding = tokenizer_json.special_id(document, tokenizer_json.PADDING)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError, StopIteration) as error:
            what = f"no tokenizer of this project: {error!r}"
            raise ConfigError(what, where=tokenizer_json.FILE_NAME, fix="shard the data again") from error
        self._encoder = _encoder_of(content)
        self._byte_ids = {text[0]: number for number, text in enumerate(self._texts) if len(text) == 1}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._content,)

    @property
    def content(self) -> bytes:
        """The file."""
        return self._content

    @property
    def num_ids(self) -> int:
        """One more than the largest."""
        return len(self._texts)

    @functools.cached_property
    def digest(self) -> str:
        """Hex sha256 of the file."""
        return storage.sha256_bytes(self._content)

    def to_dict(self) -> dict[str, Any]:
        """The file's digest, and its ids."""
        return {
            "sha256": self.digest,
            "document": self.document,
            "padding": self.padding,
            "vocab_size": self.vocab_size,
        }

    @functools.cached_property
    def bytes_per_id(self) -> np.ndarray:
        """Lengths of the ids' texts."""
        lengths = np.zeros(self.vocab_size, np.int64)
        lengths[: self.num_ids] = [len(text) for text in self._texts]
        return lengths

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of a text. Raises DataError where they do not give it back."""
        ids: list[int] = []
        for is_text, run in _runs(text.decode("utf-8", "surrogateescape")):
            ids += self._ids_of(run) if is_text else self._ids_of_bytes(run.encode("utf-8", "surrogateescape"))
        if b"".join(map(self._texts.__getitem__, ids)) != text:
            what = "the tokenizer changes this text, so its bytes could not be counted"
            raise DataError(what, value=f"{text[:60]!r}", fix="use one that keeps texts as they are, or bytes")
        return np.array(ids, self.dtype)

    def decode(self, tokens: np.ndarray) -> bytes:
        """The texts of ids, joined."""
        return b"".join(self._texts[number] for number in np.asarray(tokens).tolist() if number < self.num_ids)

    def _ids_of(self, text: str) -> list[int]:
        try:
            found: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:  # the library's panics are no exceptions of Python's, and have no name there
            if type(error).__name__ != PANIC:
                raise
            what = f"the tokenizer cannot split this text: {error}"
            raise DataError(what, value=f"{text[:60]!r}", fix="use another pattern in its pre-tokenizer") from error
        return found

    def _ids_of_bytes(self, content: bytes) -> list[int]:
        try:
            return [self._byte_ids[byte] for byte in content]
        except KeyError as error:
            what = f"the tokenizer has no id for the byte {error}, which is no UTF-8"
            raise DataError(what, fix="use one whose vocabulary has every byte") from error


def train(texts: Iterable[bytes], vocab_size: int, sample_bytes: int) -> BytePairTokenizer:
    """A byte-level BPE of at most `vocab_size` ids, special ones among them, from the first `sample_bytes` of text.

    The same texts give the same tokenizer with the same release of `tokenizers`: of pairs that come equally often the
    one of the lowest ids is merged first. Memory: the different words of the texts. Raises DataError without a text.
    """
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - tokenizer_json.NUM_SPECIAL,
        initial_alphabet=list(tokenizer_json.byte_characters()),
        special_tokens=[],
        show_progress=False,
    )
    sample = _sample(texts, sample_bytes)
    first = next(sample, None)
    if first is None:
        raise DataError("there is no text to train a tokenizer on", where="task.tokenizer", fix="add documents")
    tokenizer.train_from_iterator(_joined(first, sample), trainer)
    return BytePairTokenizer(tokenizer_json.kept(tokenizer.to_str().encode()))


def _joined(first: str, others: Iterator[str]) -> Iterator[str]:
    yield first
    yield from others


def _sample(texts: Iterable[bytes], sample_bytes: int) -> Iterator[str]:
    """The first so many bytes of text, in pieces; what is no UTF-8 is left out, as no words are made of it."""
    left = sample_bytes
    for text in texts:
        if left <= 0:
            return
        taken = text[:left]
        left -= len(taken)
        for start in range(0, len(taken), PIECE_CHARACTERS):
            yield taken[start : start + PIECE_CHARACTERS].decode("utf-8", "ignore")


def _runs(text: str) -> Iterator[tuple[bool, str]]:
    """Parts of a text that follow each other, each with whether it is text and not bytes that are no UTF-8."""
    done = 0
    for found in _NO_TEXT.finditer(text):
        yield from ((True, piece) for piece in _pieces(text[done : found.start()]))
        yield False, found[0]
        done = found.end()
    yield from ((True, piece) for piece in _pieces(text[done:] if done else text))


def _pieces(text: str) -> Iterator[str]:
    """A long text in pieces, cut where words end if there is such a place."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        found = _BOUNDARY.search(text, start + PIECE_CHARACTERS // 2, end)
        stop = found.start() if found else end
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:] if start else text


def _encoder_of(content: bytes) -> Any:
    library = _library()
    try:
        encoder = library.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library has no type of its own
        what = f"the package tokenizers cannot read it: {error}"
        raise ConfigError(
            what, where=tokenizer_json.FILE_NAME, fix="save it with a release that is installed"
        ) from error
    encoder.encode_special_tokens = True  # a document that mentions a special token has its bytes
    return encoder


def _library() -> Any:
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
