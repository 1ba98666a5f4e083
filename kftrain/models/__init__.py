"""Networks: plain modules without distributed code. Importing this package does not import torch."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.models.attention import CausalAttention
    from kftrain.models.output import ModelOutput
    from kftrain.models.registry import build_model

__all__ = [
    "CausalAttention",
    "ModelOutput",
    "build_model",
]

__getattr__ = attributes(
    __name__,
    {
        "CausalAttention": "kftrain.models.attention",
        "ModelOutput": "kftrain.models.output",
        "build_model": "kftrain.models.registry",
    },
)
