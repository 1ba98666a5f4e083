"""`tokenizer.json`, as Hugging Face's `tokenizers` writes it: what is kept of one, and that of bytes.

Kept is a byte-level BPE that changes no text: what normalises it, adds a space before it, cuts it or drops merges at
random is taken out. It starts each text with the document's id, and has an id of its own for padding. So it gives the
ids that a model is trained on, to whoever loads it.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from kftrain.errors import ConfigError

FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"

DOCUMENT, PADDING = "<|document|>", "<|padding|>"
NUM_SPECIAL = 2

DOCUMENT_TOKENS = (DOCUMENT, "<|begin_of_text|>", "<|endoftext|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]")
"""Names that a document's start has elsewhere: the first of them that a foreign tokenizer has is taken."""

Json = dict[str, Any]


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it can be seen (GPT-2)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in visible else next(others)) for byte in range(256))


@functools.cache
def of_bytes() -> bytes:
    """The tokenizer whose ids are bytes."""
    vocabulary = {character: number for number, character in enumerate(byte_characters())}
    model: Json = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocabulary, "merges": []}
    document: Json = {
        **{"version": "1.0", "added_tokens": [], "model": model, "decoder": _byte_level(use_regex=True)},
        **{"pre_tokenizer": _byte_level(use_regex=False)},
    }
    return _dumped(_kept(document, "", FILE_NAME))


def kept(content: bytes, document_token: str = "", where: str = FILE_NAME) -> bytes:
    """What is kept of a `tokenizer.json`, the same bytes for the same content.

    `document_token`: what starts a document; empty: the first of `DOCUMENT_TOKENS` that is there, or one more id.
    Raises ConfigError for what is no byte-level BPE.
    """
    try:
        document = json.loads(content)
        return _dumped(_kept(document, document_token, where))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"no tokenizer.json: {error}", where=where, fix="save it with tokenizers' save()") from error


def special_id(document: Json, name: str) -> int:
    """The id of a special token."""
    return int(next(token["id"] for token in document["added_tokens"] if token["content"] == name))


def document_id(document: Json) -> int:
    """The id that starts each text of a kept tokenizer."""
    (only,) = document["post_processor"]["special_tokens"].values()
    return int(only["ids"][0])


def texts_of_ids(document: Json) -> list[bytes]:
    """The bytes that each id stands for; none for special ones, nor for numbers that are no id. Raises ValueError."""
    byte_of = {character: number for number, character in enumerate(byte_characters())}
    found = {int(number): _bytes_of(token, byte_of) for token, number in document["model"]["vocab"].items()}
    for token in document["added_tokens"]:
        found[int(token["id"])] = b"" if token["special"] else token["content"].encode()
    if not found or min(found) < 0 or max(found) > 2 * len(found):
        raise ValueError("its ids are no numbers that follow each other")
    return [found.get(number, b"") for number in range(max(found) + 1)]


def configuration(content: bytes, sequence_length: int) -> bytes:
    """`tokenizer_config.json`, with which `transformers.AutoTokenizer` loads a kept tokenizer."""
    document = json.loads(content)
    start = next(iter(document["post_processor"]["special_tokens"]))
    return _dumped(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": start,
            "eos_token": start,
            "pad_token": PADDING,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
            "model_max_length": sequence_length,
        }
    )


def _kept(document: Json, document_token: str, where: str) -> Json:
    model = document["model"]
    if model.get("type") != "BPE" or not {"ByteLevel"} <= _types(document["pre_tokenizer"]) & _types(
        document["decoder"]
    ):
        raise ConfigError(
            "no byte-level BPE, so texts would not come back as they were",
            where=where,
            value=model.get("type"),
            fix="use one with the pre-tokenizer and the decoder ByteLevel, as those of GPT-2, Llama 3 and Qwen",
        )
    vocabulary, added = model["vocab"], [dict(token) for token in document.get("added_tokens") or ()]
    start = document_token or next((name for name in DOCUMENT_TOKENS if any(t["content"] == name for t in added)), "")
    if document_token and all(token["content"] != document_token for token in added):
        known = ", ".join(token["content"] for token in added if token["special"])[:200]
        what = "the tokenizer has no such special token"
        raise ConfigError(what, where="task.tokenizer.document_token", value=document_token, fix=f"known: {known}")
    for name in (start or DOCUMENT, PADDING):
        if all(token["content"] != name for token in added):
            ids = [*vocabulary.values(), *(token["id"] for token in added)]
            added.append(_special(name, 1 + max(ids)))
    texts_of_ids({"model": model, "added_tokens": added})
    first = next(token for token in added if token["content"] == (start or DOCUMENT))
    first["special"] = True
    return {
        "version": document.get("version", "1.0"),
        **{"truncation": None, "padding": None, "added_tokens": added, "normalizer": None},
        "pre_tokenizer": _without_space(document["pre_tokenizer"]),
        "post_processor": _starting_with(first["content"], int(first["id"])),
        "decoder": document["decoder"],
        "model": {**model, "dropout": None},
    }


def _types(part: Any) -> set[str]:
    """The types of a pre-tokenizer or a decoder, and of those that it consists of."""
    if not isinstance(part, dict):
        return set()
    inner = [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return {str(part.get("type"))}.union(*map(_types, inner))


def _without_space(part: Json) -> Json:
    changed = {**part, "add_prefix_space": False} if part.get("type") == "ByteLevel" else dict(part)
    if "pretokenizers" in changed:
        changed["pretokenizers"] = [_without_space(each) for each in changed["pretokenizers"]]
    return changed


def _starting_with(token: str, number: int) -> Json:
    start, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    again, other = {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        **{"type": "TemplateProcessing", "single": [start, text], "pair": [start, text, again, other]},
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _special(name: str, number: int) -> Json:
    no = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **no, "special": True}


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _bytes_of(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes(byte_of[character] for character in token)
    except KeyError as error:
        raise ValueError(f"the token {token!r:.40} is not made of bytes") from error


def _dumped(document: Json) -> bytes:
    return (json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()
