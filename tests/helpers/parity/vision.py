"""A vision transformer for the table of parity, written again in plain torch, and its images."""

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from helpers.parity.oracle import BASE, Case
from torch import nn

SIDE, PATCH, DIM, HEADS, CLASSES, NUM_IMAGES = 8, 2, 16, 4, 5, 29

VISION = "\n".join(line for line in BASE.splitlines() if not line.startswith(("task:", "model:"))) + (
    f"\ntask: {{kind: image_classification, image_size: {SIDE}, num_classes: {CLASSES}}}"
    f"\nmodel: {{kind: vision_transformer, dim: {DIM}, num_layers: 2, num_heads: {HEADS}, patch_size: {PATCH}}}\n"
)


class Vision(nn.Module):
    """The network of `VISION`."""

    def __init__(self):
        super().__init__()
        self.patch_embedding = nn.Conv2d(1, DIM, PATCH, PATCH)
        self.position_embedding = nn.Parameter(torch.empty((SIDE // PATCH) ** 2, DIM))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images):
        x = self.patch_embedding(images).flatten(2).transpose(1, 2) + self.position_embedding
        for layer in self.layers:
            x = x + layer.attend(layer.attention_norm(x))
            x = x + layer.contract(F.gelu(layer.expand(layer.mlp_norm(x))))
        return self.head(self.norm(x).mean(1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.project = nn.Linear(DIM, DIM)
        self.mlp_norm = nn.LayerNorm(DIM)
        self.expand = nn.Linear(DIM, 2 * DIM)
        self.contract = nn.Linear(2 * DIM, DIM)

    def attend(self, x):
        rows, places, dim = x.shape
        query, key, value = (each.view(rows, places, HEADS, -1) for each in self.qkv(x).split(dim, -1))
        shares = torch.softmax(torch.einsum("bihe,bjhe->bhij", query, key) / math.sqrt(dim // HEADS), -1)
        return self.project(torch.einsum("bhij,bjhe->bihe", shares, value).reshape(rows, places, dim))


def image_rows():
    generator = np.random.default_rng(5)
    images = generator.integers(0, 256, (NUM_IMAGES, SIDE, SIDE, 1)).astype(np.uint8)
    return {"image": images, "label": generator.integers(0, CLASSES, NUM_IMAGES)}


def image_loss(network, rows):
    pixels = torch.from_numpy(rows["image"].astype(np.float32)).permute(0, 3, 1, 2)
    logits = network((pixels / 255 - 0.5) / 0.5)
    return -torch.log_softmax(logits, -1)[torch.arange(len(logits)), torch.from_numpy(rows["label"])].sum()


def image_terms(rows):
    return len(rows["label"])


IMAGES = Case("images", (), Vision, image_rows, image_loss, image_terms, base=VISION)
