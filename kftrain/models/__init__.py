"""Networks: plain modules without distributed code. Importing this package does not import torch."""

from kftrain.models.registry import build_model

__all__ = ["build_model"]
