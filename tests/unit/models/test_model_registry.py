import subprocess
import sys

import pytest
import torch

from kftrain.errors import ConfigError, UserCodeError
from kftrain.models import build_model
from kftrain.models.settings import ModelConfig
from kftrain.models.transformer import Transformer
from kftrain.models.vision_transformer import VisionTransformer

TEXT = {"vocab_size": 320, "sequence_length": 32, "document_token": 256}
IMAGES = {"image_size": 8, "num_channels": 1, "num_classes": 10}


class OwnModel(torch.nn.Linear):
    def __init__(self, num_inputs: int, scale: float = 1.0, **others: int) -> None:
        super().__init__(num_inputs, 1)
        self.scale = scale


def own_function(num_inputs):
    return torch.nn.Linear(num_inputs, 2)


def failing(num_inputs):
    raise RuntimeError("no such layer")


def no_module(num_inputs):
    return [num_inputs]


def own(name, **options):
    return ModelConfig(kind=f"{__name__}:{name}", **options)


def test_built_in_kinds_are_built_with_arguments_and_options():
    model = build_model(ModelConfig(kind="transformer", dim=24, num_heads=2, num_layers=1), TEXT)
    assert isinstance(model, Transformer) and model.model.embed_tokens.weight.shape == (320, 24)
    assert isinstance(build_model(ModelConfig(kind="vision_transformer"), IMAGES), VisionTransformer)


def test_a_users_class_or_function_is_called_with_arguments_and_options():
    model = build_model(own("OwnModel", scale=2), {"num_inputs": 3, "num_classes": 4})
    assert isinstance(model, OwnModel) and model.in_features == 3 and model.scale == 2.0
    assert build_model(own("own_function"), {"num_inputs": 3}).out_features == 2


@pytest.mark.parametrize(
    ("config", "arguments", "where", "part"),
    [
        (ModelConfig(kind="transformr"), TEXT, "model.kind", "did you mean 'transformer'?"),
        (
            ModelConfig(kind="zzz"),
            TEXT,
            "model.kind",
            "known: click_network, mixture_of_experts, skip_gram_network, transformer",
        ),
        (ModelConfig(num_layer=2), TEXT, "model.num_layer", "did you mean 'num_layers'?"),
        (ModelConfig(dim=0), TEXT, "model.dim", "greater than or equal to 1"),
        (ModelConfig(dim="wide"), TEXT, "model.dim", "integer"),
        (ModelConfig(dim=48, num_heads=7), TEXT, "model.num_heads", "do not divide"),
        (ModelConfig(vocab_size=10), TEXT, "model.vocab_size", "set by the task"),
        (ModelConfig(kind="vision_transformer"), TEXT, "model.kind", "does not accept vocab_size"),
        (own("OwnModel"), {}, "model.num_inputs", "required option is missing"),
        (own("own_function"), {"num_classes": 2}, "model.kind", "does not accept num_classes"),
        (own("no_module"), {"num_inputs": 2}, "model.kind", "torch.nn.Module"),
        (own("TEXT"), {}, "model.kind", "neither a class nor a function"),
        (own("Missing"), {}, "model.kind", "has no Missing"),
        (ModelConfig(kind="no_such_module:Model"), {}, "model.kind", "no module named no_such_module"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_place_and_the_fix(config, arguments, where, part):
    with pytest.raises(ConfigError) as raised:
        build_model(config, arguments)
    assert raised.value.where == where
    assert part in raised.value.line


def test_what_a_users_model_raises_is_the_users_error():
    with pytest.raises(UserCodeError, match="no such layer"):
        build_model(own("failing"), {"num_inputs": 2})


def test_importing_the_package_does_not_import_torch():
    code = "import sys; sys.modules['torch'] = None; import kftrain.models, kftrain.models.options, kftrain.models.base"
    subprocess.run([sys.executable, "-c", code], check=True)
