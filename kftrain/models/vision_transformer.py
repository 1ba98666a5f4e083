"""Small vision transformer: patches, learned positions, pre-norm GELU blocks, mean pooling, a linear head.

Mean pooling rather than a class token: as accurate at this size (Beyer et al., arXiv:2205.01580) and one
token less. No operation crosses images, so an image's logits do not depend on the rest of its batch.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from pydantic import Field
from torch import Tensor, nn

from kftrain.models import sizes
from kftrain.models.base import ModelPiece, draw_weights, run_pieces
from kftrain.settings.section import Count, Probability

INITIAL_STD = 0.02
"""Standard deviation of the initial position embedding."""


class VisionTransformer(nn.Module):
    """Classifier that turns images `[B, C, H, W]` float into logits `[B, num_classes]`.

    Args:
        image_size: Height and width in pixels; from the task.
        num_channels: Channels of an image; from the task.
        num_classes: Classes; from the task.
        dim: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Attention heads; they divide `dim`.
        patch_size: Side of a square patch in pixels; divides `image_size`.
        mlp_ratio: Inner width of the feed-forward part, as a multiple of `dim`.
        dropout: Probability of dropping what a block adds to the residual stream, in training.

    Raises ConfigError for sizes that do not divide each other.
    """

    def __init__(
        self,
        *,
        image_size: Count,
        num_channels: Count = 1,
        num_classes: Annotated[int, Field(ge=2)],
        dim: Count = 64,
        num_layers: Count = 3,
        num_heads: Count = 4,
        patch_size: Count = 2,
        mlp_ratio: Count = 2,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__()
        self.num_patches = sizes.of_vision_transformer(
            image_size=image_size, patch_size=patch_size, dim=dim, num_heads=num_heads
        )
        self.image_size = image_size
        self.patch_size = patch_size
        self.num_heads = num_heads
        self.mlp_ratio = mlp_ratio
        self.dropout = dropout
        self.patch_embedding = nn.Conv2d(num_channels, dim, kernel_size=patch_size, stride=patch_size)
        self.position_embedding = nn.Parameter(torch.empty(self.num_patches, dim))
        self.layers = nn.ModuleList(VisionBlock(dim, num_heads, mlp_ratio * dim, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        draw_weights(self)

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits `[B, num_classes]` of `images` `[B, C, H, W]`."""
        logits: Tensor = run_pieces(self, self.stages(), None, (images,))
        return logits

    def stages(self) -> list[ModelPiece]:
        """Return the pieces of the forward pass: patches and their positions, each block, the head behind its norm."""
        blocks = [ModelPiece(functools.partial(_call_block, block), (block,)) for block in self.layers]
        first = ModelPiece(lambda _, inputs: self._embed(*inputs), (self.patch_embedding, self))
        last = ModelPiece(lambda hidden, _: self.head(self.norm(hidden).mean(dim=1)), (self.norm, self.head))
        return [first, *blocks, last]

    def _embed(self, images: Tensor) -> Tensor:
        patches: Tensor = self.patch_embedding(images)
        return patches.flatten(2).transpose(1, 2) + self.position_embedding

    def init_weights(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Initialise one parameter in place.

        Xavier-uniform matrices and zero biases, as in the original; the classifier starts at zero, that is
        undecided.
        """
        if name == "position_embedding":
            nn.init.normal_(parameter, std=INITIAL_STD, generator=generator)
        elif name.startswith("head.") or name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)

    def blocks(self) -> list[nn.Module]:
        """Return the repeated modules: each is sharded, and may be recomputed, as one unit."""
        return list(self.layers)

    def tensor_plan(self) -> dict[str, str]:
        """Map modules to the way in which their matrices are split: see `parallel/tensor_plan.py`."""
        # Patches are embedded whole, with their positions; the blocks have parts of them, up to the norm, behind which
        # the mean is over all patches.
        return {
            "layers.*norm": "sequence",
            "layers.*.qkv": "column/3",
            "layers.*.project": "row",
            "layers.*.expand": "column",
            "layers.*.contract": "row",
            "layers.*.dropout": "random",
            "layers.0": "split",
            "norm": "whole",
        }

    def tensor_sizes(self) -> dict[str, int]:
        """Return the sizes that the number of processes along the axis `tensor` must divide, by option."""
        return sizes.splits_of_vision_transformer(
            image_size=self.image_size,
            patch_size=self.patch_size,
            dim=self.head.in_features,
            num_heads=self.num_heads,
            mlp_ratio=self.mlp_ratio,
        )

    def num_flops(self, num_rows: int) -> int:
        """Count the floating-point operations of a forward and backward pass, as in PaLM (appendix B)."""
        matrices = sum(parameter.numel() for parameter in self.layers.parameters() if parameter.dim() > 1)
        matrices += self.patch_embedding.weight.numel()
        attention = 12 * len(self.layers) * self.norm.normalized_shape[0] * self.num_patches
        return num_rows * (self.num_patches * (6 * matrices + attention) + 6 * self.head.weight.numel())

    def export_config(self) -> dict[str, Any]:
        """Return the `config.json` that rebuilds the network."""
        return {
            "model_type": "vision_transformer",
            "image_size": self.image_size,
            "num_channels": self.patch_embedding.in_channels,
            "num_classes": self.head.out_features,
            "dim": self.head.in_features,
            "num_layers": len(self.layers),
            "num_heads": self.num_heads,
            "patch_size": self.patch_size,
            "mlp_ratio": self.mlp_ratio,
            "dropout": self.dropout,
        }


def _call_block(block: nn.Module, hidden: Tensor, _inputs: object) -> Any:
    return block(hidden)


class VisionBlock(nn.Module):
    """Self-attention and feed-forward part, each added to the residual stream `[B, N, D]` behind its norm."""

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, mlp_dim)
        self.contract = nn.Linear(mlp_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[B, N, D]` to the same shape."""
        attended: Tensor = hidden + self.dropout(self._attend(self.attention_norm(hidden)))
        expanded = F.gelu(self.expand(self.mlp_norm(attended)))
        output: Tensor = attended + self.dropout(self.contract(expanded))
        return output

    def _attend(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.project(attended.transpose(1, 2).flatten(2))
        return projected
