"""Tokenizers: text to token ids and back, losing no byte. The option `task.tokenizer` chooses one.

Every id stands for a number of bytes of text, the special ones for none, so that bits and guesses are counted per byte
whatever the vocabulary is.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from kftrain.core import storage
from kftrain.core.plain import MAX_INTEGER
from kftrain.errors import ConfigError
from kftrain.models.options import suggest
from kftrain.settings.section import Section
from kftrain.tasks import tokenizer_json

VOCAB_MULTIPLE = 64
"""The vocabulary is rounded up to a multiple of this, for whole tiles in matrix products."""

MIN_VOCAB_SIZE = 256 + tokenizer_json.NUM_SPECIAL
"""Smallest vocabulary that has each byte and the special ids."""

MAX_TOKENIZER_BYTES = 64 << 20
"""Largest `tokenizer.json` that is read: parsed JSON takes many times its size."""


class TrainTokenizer(Section):
    """Options for training a byte-level BPE on the training split."""

    vocab_size: Annotated[int, Field(ge=MIN_VOCAB_SIZE, le=1 << 20)] = 4096
    """Number of ids, with the two special ones; fewer if the text runs out of pairs that come twice."""
    sample_bytes: Annotated[int, Field(ge=1, le=MAX_INTEGER)] = 16 << 20
    """Amount of text to train on: the first documents of the training split."""


class TokenizerOption(Section):
    """Options of `task.tokenizer`, if it is more than a name."""

    uri: str = ""
    document_token: str = ""
    train: TrainTokenizer | None = None


class Tokenizer(ABC):
    """Interface of all tokenizers; ids are 0 to `num_ids` - 1."""

    document: int
    """Id that starts every document."""
    padding: int
    """Id that fills a row behind its last token; never a target."""

    @property
    @abstractmethod
    def num_ids(self) -> int:
        """Number of ids."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """Hex digest: equal digests encode equally."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return everything that encoding depends on, as JSON."""

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a text, `[tokens]` of `dtype`."""

    @abstractmethod
    def decode(self, tokens: np.ndarray) -> bytes:
        """Return the text of ids; special ones have none."""

    @property
    @abstractmethod
    def bytes_per_id(self) -> np.ndarray:
        """Bytes of text that each id stands for, int64 `[vocab_size]`; 0 for special ones."""

    @property
    @abstractmethod
    def content(self) -> bytes:
        """Content of a `tokenizer.json` that gives the same ids."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, rounded up to a multiple of `VOCAB_MULTIPLE`."""
        return -(-self.num_ids // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def dtype(self) -> str:
        """Smallest integer format that holds all ids."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def encode_document(self, text: bytes) -> np.ndarray:
        """Return the document id and the text's ids, `[1 + tokens]` of `dtype`."""
        return np.concatenate([np.array([self.document], self.dtype), self.encode(text)])


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are their own ids; two more mark the start of a document and padding."""

    name = "bytes"
    document = 256
    padding = 257
    num_ids = 258

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes as ids."""
        return np.frombuffer(text, dtype=np.uint8).astype(self.dtype)

    def decode(self, tokens: np.ndarray) -> bytes:
        """Return the bytes among ids, without special ones."""
        return np.asarray(tokens)[np.asarray(tokens) < self.document].astype(np.uint8).tobytes()

    @functools.cached_property
    def bytes_per_id(self) -> np.ndarray:
        """Bytes of text that each id stands for: 1, or 0 for special ones."""
        return (np.arange(self.vocab_size) < self.document).astype(np.int64)

    @property
    def content(self) -> bytes:
        """Content of a `tokenizer.json` without merges, whose vocabulary is the bytes in order."""
        return tokenizer_json.make_byte_tokenizer()

    def to_dict(self) -> dict[str, Any]:
        """Return everything that encoding depends on, as JSON."""
        return {
            "name": self.name,
            "document": self.document,
            "padding": self.padding,
            "vocab_size": self.vocab_size,
        }

    @property
    def digest(self) -> str:
        """Hex digest of `to_dict`."""
        return storage.digest_json(self.to_dict())


class UntrainedTokenizer(Tokenizer):
    """Stand-in for a tokenizer that is yet to be trained: it has the largest possible sizes, and encodes nothing."""

    def __init__(self, options: TrainTokenizer) -> None:
        self.options = options
        self.document = options.vocab_size - 2
        self.padding = options.vocab_size - 1

    @property
    def num_ids(self) -> int:
        """Number of ids that training may reach."""
        return self.options.vocab_size

    @property
    def digest(self) -> str:
        """Hex digest of the training options."""
        return storage.digest_json(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the training options."""
        return {"train": self.options.model_dump(mode="json")}

    def encode(self, text: bytes) -> np.ndarray:
        """Raise ConfigError: there is no vocabulary yet."""
        raise _untrained_error()

    def decode(self, tokens: np.ndarray) -> bytes:
        """Raise ConfigError: there is no vocabulary yet."""
        raise _untrained_error()

    @property
    def bytes_per_id(self) -> np.ndarray:
        """Raise ConfigError: there is no vocabulary yet."""
        raise _untrained_error()

    @property
    def content(self) -> bytes:
        """Raise ConfigError: there is no vocabulary yet."""
        raise _untrained_error()


def parse_option(option: str | Mapping[str, Any]) -> TokenizerOption | None:
    """Parse `task.tokenizer`; None stands for bytes. Raises ConfigError."""
    if isinstance(option, str):
        if option == ByteTokenizer.name:
            return None
        if "/" not in option and not option.endswith(".json"):
            fix = suggest(option, [ByteTokenizer.name], "the URI of a tokenizer.json, or {train: {vocab_size: 4096}}")
            raise ConfigError("unknown tokenizer", where="task.tokenizer", value=option, fix=fix)
        return TokenizerOption(uri=option)
    try:
        parsed = TypeAdapter(TokenizerOption).validate_python(dict(option))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["task.tokenizer", *map(str, first["loc"])])
        raise ConfigError(first["msg"].lower(), where=where, value=first["input"]) from error
    if bool(parsed.uri) == bool(parsed.train) or (parsed.train and parsed.document_token):
        fix = "{uri: …/tokenizer.json, document_token: …} or {train: {vocab_size: 4096}}"
        raise ConfigError("needs either uri or train", where="task.tokenizer", value=dict(option), fix=fix)
    return parsed


def build_tokenizer(option: TokenizerOption | None) -> Tokenizer:
    """Build the tokenizer that the option asks for; read its file if it names one. Raises ConfigError."""
    if option is None:
        return ByteTokenizer()
    if option.train is not None:
        return UntrainedTokenizer(option.train)
    from kftrain.tasks.bpe import BytePairTokenizer

    content = tokenizer_json.clean_tokenizer(_fetch_file(option.uri), option.document_token, where=option.uri)
    return BytePairTokenizer(content)


def _fetch_file(uri: str) -> bytes:
    try:
        with storage.simplify_errors(uri):
            if (size := storage.size_bytes(uri)) > MAX_TOKENIZER_BYTES:
                raise ConfigError(f"larger than {MAX_TOKENIZER_BYTES} bytes", where=uri, value=size)
            return storage.read_bytes(uri)
    except OSError as error:
        fix = "give the URI of a tokenizer.json"
        raise ConfigError(f"cannot be read: {error}", where="task.tokenizer", value=uri, fix=fix) from error


def _untrained_error() -> ConfigError:
    return ConfigError(
        "the tokenizer is trained in the shard step, and is not at hand here",
        where="task.tokenizer",
        fix="build the task with the tokenizer of its dataset",
    )
