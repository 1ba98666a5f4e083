"""Table of models by the `kind` of the configuration's `model` section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kftrain.errors import ConfigError
from kftrain.models import options
from kftrain.models.settings import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

BUILT_IN = {
    "click_network": "kftrain.models.click_network:ClickNetwork",
    "mixture_of_experts": "kftrain.models.mixture_of_experts:MixtureOfExperts",
    "skip_gram_network": "kftrain.models.skip_gram_network:SkipGramNetwork",
    "transformer": "kftrain.models.transformer:Transformer",
    "vision_transformer": "kftrain.models.vision_transformer:VisionTransformer",
}
"""Kind -> `module:attr`, imported when it is built."""


def build_model(config: ModelConfig, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the model of a `model` section, with fp32 weights; `arguments` are the task's `model_arguments()`.

    Raises ConfigError for an unknown kind, an option that is unknown, missing, of the wrong type or at odds with
    another, and if a user's `module:attr` does not give a module; UserCodeError if it raises.
    """
    from torch import nn

    target = find_target(config)
    model = options.construct(target, config.kind, "model", config.options(), arguments)
    if not isinstance(model, nn.Module):
        raise _no_module(config.kind, f"gives a {type(model).__name__},")
    _to_fp32(model)
    return model


def find_target(config: ModelConfig) -> Callable[..., Any]:
    """Import the class or function that builds the model, without calling it. Raises ConfigError."""
    from torch import nn

    target = options.import_kind(config.kind, BUILT_IN, "model")
    if isinstance(target, type) and not issubclass(target, nn.Module):
        raise _no_module(config.kind, "is")
    return target


def _no_module(kind: str, what: str) -> ConfigError:
    return ConfigError(f"{what} no torch.nn.Module", where="model.kind", value=kind, fix="name a subclass of it")


def _to_fp32(model: nn.Module) -> None:
    """Convert parameters and buffers of fewer bits to fp32, in place; a buffer in fp64 stays.

    Master weights are fp32 whatever a model was built in; `precision.compute` sets what is computed in. Raises
    ConfigError for a parameter in fp64, or one that is no real number or has no shape yet.
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
