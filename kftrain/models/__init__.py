"""Networks: plain modules without distributed code. Importing this package does not import torch."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.models.attention import CausalAttention as CausalAttention
    from kftrain.models.output import ModelOutput as ModelOutput
    from kftrain.models.registry import build_model as build_model
    from kftrain.models.sparse_embedding import SparseEmbedding as SparseEmbedding

__getattr__ = attributes(
    __name__,
    {
        "kftrain.models.attention": ("CausalAttention",),
        "kftrain.models.output": ("ModelOutput",),
        "kftrain.models.sparse_embedding": ("SparseEmbedding",),
        "kftrain.models.registry": ("build_model",),
    },
)
