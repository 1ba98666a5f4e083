"""`tokenizer.json` files, as Hugging Face's `tokenizers` writes them: cleaning one for training, and that of bytes.

A cleaned file is a byte-level BPE that changes no text: normalisers, added spaces, truncation and randomly dropped
merges are removed. It starts each text with the document's id, and has an id of its own for padding. So everybody who
loads it gets the ids that a model is trained on.
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
"""Names of the token that starts a document elsewhere; the first one that a foreign tokenizer has is taken."""

Json = dict[str, Any]


@functools.cache
def byte_characters() -> tuple[str, ...]:
    """Return the character for each byte in a byte-level vocabulary: itself if it is visible (as in GPT-2)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in visible else next(others)) for byte in range(256))


@functools.cache
def make_byte_tokenizer() -> bytes:
    """Return the file of the tokenizer whose ids are bytes: a BPE without merges."""
    vocabulary = {character: number for number, character in enumerate(byte_characters())}
    model: Json = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocabulary, "merges": []}
    document: Json = {
        **{"version": "1.0", "added_tokens": [], "model": model, "decoder": _make_byte_level(use_regex=True)},
        **{"pre_tokenizer": _make_byte_level(use_regex=False)},
    }
    return _dump_json(_clean(document, "", FILE_NAME))


def clean_tokenizer(content: bytes, document_token: str = "", where: str = FILE_NAME) -> bytes:
    """Clean a `tokenizer.json` for training; the same content gives the same bytes.

    `document_token`: the token that starts a document; empty: the first of `DOCUMENT_TOKENS` in the file, or a new id.
    Raises ConfigError for what is no byte-level BPE.
    """
    try:
        document = json.loads(content)
        return _dump_json(_clean(document, document_token, where))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"no tokenizer.json: {error}", where=where, fix="save it with tokenizers' save()") from error


def special_id(document: Json, name: str) -> int:
    """Return the id of a special token."""
    return int(next(token["id"] for token in document["added_tokens"] if token["content"] == name))


def document_id(document: Json) -> int:
    """Return the id with which a cleaned tokenizer starts each text."""
    (only,) = document["post_processor"]["special_tokens"].values()
    return int(only["ids"][0])


def texts_of_ids(document: Json) -> list[bytes]:
    """Return the bytes of each id; empty for special ones, and for numbers that are no id. Raises ValueError."""
    byte_of = {character: number for number, character in enumerate(byte_characters())}
    texts = {int(number): _bytes_of(token, byte_of) for token, number in document["model"]["vocab"].items()}
    for token in document["added_tokens"]:
        texts[int(token["id"])] = b"" if token["special"] else token["content"].encode()
    if not texts or min(texts) < 0 or max(texts) > 2 * len(texts):
        raise ValueError("its ids are no numbers that follow each other")
    return [texts.get(number, b"") for number in range(max(texts) + 1)]


def make_tokenizer_config(content: bytes, sequence_length: int) -> bytes:
    """Make `tokenizer_config.json`, with which `transformers.AutoTokenizer` loads a cleaned tokenizer."""
    document = json.loads(content)
    start = next(iter(document["post_processor"]["special_tokens"]))
    return _dump_json(
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


def _clean(document: Json, document_token: str, where: str) -> Json:
    model = document["model"]
    if model.get("type") != "BPE" or not {"ByteLevel"} <= _collect_types(document["pre_tokenizer"]) & _collect_types(
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
            added.append(_make_special(name, 1 + max(ids)))
    texts_of_ids({"model": model, "added_tokens": added})
    first = next(token for token in added if token["content"] == (start or DOCUMENT))
    first["special"] = True
    return {
        "version": document.get("version", "1.0"),
        **{"truncation": None, "padding": None, "added_tokens": added, "normalizer": None},
        "pre_tokenizer": _remove_space(document["pre_tokenizer"]),
        "post_processor": _start_with(first["content"], int(first["id"])),
        "decoder": document["decoder"],
        "model": {**model, "dropout": None},
    }


def _collect_types(part: Any) -> set[str]:
    """Collect the types of a pre-tokenizer or a decoder, and of those that it consists of."""
    if not isinstance(part, dict):
        return set()
    inner = [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return {str(part.get("type"))}.union(*map(_collect_types, inner))


def _remove_space(part: Json) -> Json:
    changed = {**part, "add_prefix_space": False} if part.get("type") == "ByteLevel" else dict(part)
    if "pretokenizers" in changed:
        changed["pretokenizers"] = [_remove_space(part) for part in changed["pretokenizers"]]
    return changed


def _start_with(token: str, number: int) -> Json:
    start, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    again, other = {"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        **{"type": "TemplateProcessing", "single": [start, text], "pair": [start, text, again, other]},
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _make_special(name: str, number: int) -> Json:
    no = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **no, "special": True}


def _make_byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _bytes_of(token: str, byte_of: dict[str, int]) -> bytes:
    try:
        return bytes(byte_of[character] for character in token)
    except KeyError as error:
        raise ValueError(f"the token {token!r:.40} is not made of bytes") from error


def _dump_json(document: Json) -> bytes:
    return (json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()
