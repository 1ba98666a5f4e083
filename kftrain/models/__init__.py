"""Networks: plain modules without distributed code. Importing this package does not import torch."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.models.attention import CausalAttention
    from kftrain.models.output import ModelOutput
    from kftrain.models.registry import build_model
    from kftrain.models.sparse_embedding import SparseEmbedding

__all__ = [
    "CausalAttention",
    "ModelOutput",
    "SparseEmbedding",
    "build_model",
]

__getattr__ = attributes(
    __name__,
    {
        "CausalAttention": "kftrain.models.attention",
        "ModelOutput": "kftrain.models.output",
        "SparseEmbedding": "kftrain.models.sparse_embedding",
        "build_model": "kftrain.models.registry",
    },
)
