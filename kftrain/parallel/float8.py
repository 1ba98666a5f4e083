"""Matrix products of blocks in float8, by torchao: weights, inputs and gradients are scaled when they are needed.

Each tensor has a scale of its own, from its largest number (Micikevicius et al. 2022, arXiv:2209.05433). The masters
stay fp32, and all but these products is computed in bf16. On the CPU torchao emulates it: the same roundings, slowly.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.settings import ParallelConfig
from kftrain.parallel.shape import Shape

MULTIPLE = 16
"""Number that must divide both sizes of a matrix: the kernels of GPUs take no others."""

FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with products in float8."""


def require_float8(parallel: ParallelConfig, shape: Shape, device: torch.device) -> None:
    """Raises ConfigError where torchao is missing, or the layout or the device cannot compute in float8."""
    if importlib.util.find_spec("torchao") is None:
        raise _refuse("torchao is not installed", "pip install 'kftrain[float8]' in the image of the workers")
    if shape.size > 1 and (parallel.stage != "fsdp" or shape.size != shape.shard):
        raise _refuse("float8 is for one process, or fsdp along shard alone", "use parallel.strategy: fsdp, or bf16")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        raise _refuse(f"{torch.cuda.get_device_name(device)} has no products in float8", "use bf16")


def _refuse(what: str, fix: str) -> ConfigError:
    return ConfigError(what, where="precision.compute", value="float8", fix=fix)


@dataclass(frozen=True)
class Float8Products:
    """Lets the linear layers of the blocks compute in float8; before what wraps or spreads them."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Put layers of torchao in the places of torch's. Raises ConfigError where there are none to replace."""
        from torchao.float8 import Float8LinearConfig  # torchao is an extra, and takes seconds to import
        from torchao.float8.float8_linear import Float8Linear

        config = Float8LinearConfig(emulate=distributed.mesh.world.device.type == "cpu")
        layers = {id(layer) for name in blocks for layer in list_linear_layers(distributed.model.get_submodule(name))}
        if not layers:
            what = f"no linear layer within the model's blocks() has sizes that {MULTIPLE} divides"
            raise _refuse(what, "choose such sizes, or bf16")
        for parent in list(distributed.model.modules()):
            for name, child in list(parent.named_children()):
                if id(child) in layers:
                    made = Float8Linear.from_float(child, config)
                    # The same dict of parameters: who fills or spreads the places of the one does so for the other.
                    made._parameters = child._parameters
                    setattr(parent, name, made)


def list_linear_layers(block: nn.Module) -> list[nn.Linear]:
    """List the linear layers of a block whose products can be computed in float8."""
    linear = [module for module in block.modules() if type(module) is nn.Linear]
    return [layer for layer in linear if layer.in_features % MULTIPLE == 0 == layer.out_features % MULTIPLE]
