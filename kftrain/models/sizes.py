"""Checks of the sizes of built-in models against each other. Imports no torch.

The model's constructor calls them, and so does the first step of a run, before any data is read: see `signature`.
Arguments have the names of the constructor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kftrain.errors import ConfigError


def of_transformer(*, dim: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the head dim; 0 for `num_kv_heads` stands for as many as heads.

    Raises ConfigError if heads do not divide `dim`, or key-value heads do not divide heads, or the head dim is odd:
    rotary embedding rotates pairs of elements.
    """
    head_dim = _head_dim(dim, num_heads)
    if num_heads % (num_kv_heads or num_heads):
        raise ConfigError(
            f"{num_kv_heads} key-value heads do not divide {num_heads} heads",
            where="model.num_kv_heads",
            fix="use a divisor",
        )
    if head_dim % 2:
        raise ConfigError(
            f"rotary embedding needs an even head dim, dim / num_heads is {head_dim}",
            where="model.dim",
            fix="change dim",
        )
    return head_dim


def of_vision_transformer(*, image_size: int, patch_size: int, dim: int, num_heads: int) -> int:
    """Return the number of patches. Raises ConfigError if patches do not divide images, or heads `dim`."""
    if image_size % patch_size:
        raise ConfigError(
            f"patches of {patch_size} do not divide images of {image_size}",
            where="model.patch_size",
            fix="use a divisor",
        )
    _head_dim(dim, num_heads)
    return (image_size // patch_size) ** 2


FFN_MULTIPLE = 64
"""A derived `ffn_dim` is rounded up to a multiple of this, for whole tiles in matrix products."""


def default_ffn_dim(dim: int) -> int:
    """Return 8/3 of `dim`, rounded up: so three matrices are as large as the classic two at 4 * dim."""
    return -(-8 * dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


def count_parameters(options: Mapping[str, Any]) -> int:
    """Count the parameters of a `transformer`, all of whose options are given."""
    dim, vocabulary = options["dim"], options["vocab_size"]
    key_values = (options["num_kv_heads"] or options["num_heads"]) * _head_dim(dim, options["num_heads"])
    ffn_dim = options["ffn_dim"] or default_ffn_dim(dim)
    block = 2 * dim * dim + 2 * dim * key_values + 3 * dim * ffn_dim + 2 * dim
    count: int = options["num_layers"] * block + dim + vocabulary * dim * (1 if options["tie_embeddings"] else 2)
    return count


def splits_of_transformer(
    *, dim: int, num_heads: int, num_kv_heads: int, ffn_dim: int, sequence_length: int
) -> dict[str, int]:
    """Return the sizes that the number of processes along the axis `tensor` must divide, by option."""
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or num_heads,
        "ffn_dim": ffn_dim or default_ffn_dim(dim),
        "sequence_length": sequence_length,
    }


def splits_of_vision_transformer(
    *, image_size: int, patch_size: int, dim: int, num_heads: int, mlp_ratio: int
) -> dict[str, int]:
    """Return the sizes that the number of processes along the axis `tensor` must divide; patches are a sequence."""
    return {
        "num_heads": num_heads,
        "mlp_ratio * dim": mlp_ratio * dim,
        "sequence_length": (image_size // patch_size) ** 2,
    }


SIZES: Mapping[str, Callable[..., Any]] = {
    "transformer": of_transformer,
    "vision_transformer": of_vision_transformer,
}
"""Kind -> function that checks the sizes of a model of that kind."""

SPLITS: Mapping[str, Callable[..., dict[str, int]]] = {
    "transformer": splits_of_transformer,
    "vision_transformer": splits_of_vision_transformer,
}
"""Kind -> function that returns the sizes that the number of processes along the axis `tensor` must divide."""


def _head_dim(dim: int, num_heads: int) -> int:
    if dim % num_heads:
        raise ConfigError(
            f"{num_heads} heads do not divide dim {dim}",
            where="model.num_heads",
            fix="make dim a multiple of num_heads",
        )
    return dim // num_heads
