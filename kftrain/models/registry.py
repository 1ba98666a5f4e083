"""Table of models by the `kind` of the configuration's `model` section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kftrain.errors import ConfigError
from kftrain.models import options
from kftrain.models.masters import to_fp32
from kftrain.models.settings import ModelConfig

if TYPE_CHECKING:
    from torch import nn

BUILT_IN = {
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
    to_fp32(model)
    return model


def find_target(config: ModelConfig) -> Callable[..., Any]:
    """Import the class or function that builds the model, without calling it. Raises ConfigError."""
    from torch import nn

    target = options.find(config.kind, BUILT_IN, "model")
    if isinstance(target, type) and not issubclass(target, nn.Module):
        raise _no_module(config.kind, "is")
    return target


def _no_module(kind: str, what: str) -> ConfigError:
    return ConfigError(f"{what} no torch.nn.Module", where="model.kind", value=kind, fix="name a subclass of it")
