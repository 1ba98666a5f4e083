"""Text to token ids and back. Bytes need no vocabulary file and lose nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from kftrain import storage
from kftrain.errors import ConfigError
from kftrain.models.options import suggest

VOCAB_MULTIPLE = 64
"""The vocabulary is rounded up to a multiple of this, for whole tiles in matrix products."""


class ByteTokenizer:
    """UTF-8 bytes are their own ids; two more mark the start of a document and padding."""

    name = "bytes"
    num_bytes = 256
    document = 256
    """Id that starts every document."""
    padding = 257
    """Id that fills a row behind its last token; never a target."""
    dtype = "uint16"

    @property
    def vocab_size(self) -> int:
        """Number of ids, rounded up."""
        return -(-(self.padding + 1) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def encode_document(self, text: bytes) -> np.ndarray:
        """The document id and the bytes, `[1 + len(text)]` uint16."""
        tokens = np.empty(1 + len(text), dtype=self.dtype)
        tokens[0] = self.document
        tokens[1:] = np.frombuffer(text, dtype=np.uint8)
        return tokens

    def decode(self, tokens: np.ndarray) -> bytes:
        """The bytes among `tokens`."""
        return np.asarray(tokens)[np.asarray(tokens) < self.num_bytes].astype(np.uint8).tobytes()

    def to_dict(self) -> dict[str, Any]:
        """All that encoding depends on."""
        return {
            "name": self.name,
            "document": self.document,
            "padding": self.padding,
            "vocab_size": self.vocab_size,
        }

    @property
    def digest(self) -> str:
        """Hex digest of `to_dict`: equal digests encode equally."""
        return storage.digest_json(self.to_dict())


TOKENIZERS = {"bytes": ByteTokenizer}


def build_tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer of that name. Raises ConfigError with the nearest for an unknown one."""
    if name not in TOKENIZERS:
        raise ConfigError("unknown tokenizer", where="task.tokenizer", value=name, fix=suggest(name, TOKENIZERS))
    return TOKENIZERS[name]()
