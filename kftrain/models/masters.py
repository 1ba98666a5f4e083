"""Master weights: trained in fp32, whatever a model was built in; `precision.compute` sets what is computed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kftrain.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn


def to_fp32(model: nn.Module) -> None:
    """Convert parameters and buffers of fewer bits to fp32, in place; a buffer in fp64 stays.

    Raises ConfigError for a parameter in fp64, or one that is no real number or has no shape yet.
    """
    import torch
    from torch.nn.parameter import is_lazy

    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                "a lazy parameter has no shape before it is used",
                where=f"model {name}",
                fix="use the module that is told its input size",
            )
        if parameter.dtype == torch.float64 or not parameter.is_floating_point():
            raise ConfigError(
                "weights are trained in fp32",
                where=f"model {name}",
                value=str(parameter.dtype),
                fix="build it in fp32; numbers that are not trained are buffers",
            )
        if _is_short(parameter):
            parameter.data = parameter.data.float()
    longer: dict[int, torch.Tensor] = {}  # by identity, so that modules which share a buffer go on sharing it
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if _is_short(buffer):
                module._buffers[name] = longer.setdefault(id(buffer), buffer.float())


def _is_short(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4
