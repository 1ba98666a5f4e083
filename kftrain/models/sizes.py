"""What the sizes of a built-in model require of each other. Imports no torch.

The model's constructor asks, and the first step of a run does, before any data is read: see `signature`. Arguments are
called as those of the constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kftrain.errors import ConfigError


def of_transformer(*, dim: int, num_heads: int, num_kv_heads: int) -> int:
    """The head dim; `num_kv_heads` 0: as many as heads. Raises ConfigError where the heads do not fit `dim` or another.

    Rotary embedding rotates pairs of elements.
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
    """Number of patches. Raises ConfigError where patches do not divide images, or heads do not divide `dim`."""
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
    """8/3 of `dim`, so that three matrices are as large as the classic two at 4 * dim, rounded up."""
    return -(-8 * dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE


def splits_of_transformer(
    *, dim: int, num_heads: int, num_kv_heads: int, ffn_dim: int, sequence_length: int
) -> dict[str, int]:
    """Option -> size that the processes which split the matrices must divide."""
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or num_heads,
        "ffn_dim": ffn_dim or default_ffn_dim(dim),
        "sequence_length": sequence_length,
    }


def splits_of_vision_transformer(
    *, image_size: int, patch_size: int, dim: int, num_heads: int, mlp_ratio: int
) -> dict[str, int]:
    """The same; each patch is a place of a sequence."""
    return {
        "num_heads": num_heads,
        "mlp_ratio * dim": mlp_ratio * dim,
        "sequence_length": (image_size // patch_size) ** 2,
    }


SIZES: Mapping[str, Callable[..., Any]] = {
    "transformer": of_transformer,
    "vision_transformer": of_vision_transformer,
}
"""Kind -> what checks the sizes of a model of that kind."""

SPLITS: Mapping[str, Callable[..., dict[str, int]]] = {
    "transformer": splits_of_transformer,
    "vision_transformer": splits_of_vision_transformer,
}
"""Kind -> what tells the sizes that the processes of the axis `tensor` must divide."""


def _head_dim(dim: int, num_heads: int) -> int:
    if dim % num_heads:
        raise ConfigError(
            f"{num_heads} heads do not divide dim {dim}",
            where="model.num_heads",
            fix="make dim a multiple of num_heads",
        )
    return dim // num_heads
