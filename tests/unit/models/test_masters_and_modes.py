"""Weights that are trained are fp32; what is kept in evaluation mode stays there."""

import pytest
import torch
from torch import nn

from kftrain.errors import ConfigError
from kftrain.models import build_model, modes
from kftrain.models.settings import ModelConfig


def build(dtype=torch.bfloat16, extra="module"):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).to(dtype)
    model[2].weight = model[0].weight
    if extra == "complex":
        model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    if extra == "integers":
        model.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    if extra == "long buffer":
        model.register_buffer("table", torch.zeros(2, dtype=torch.float64))
    return model


def built(**options):
    return build_model(ModelConfig(kind=f"{__name__}:named", **options), {})


def named(*, dtype: str, extra: str = "module"):
    return build(getattr(torch, dtype), extra)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_parameters_and_buffers_of_a_short_model_become_fp32_and_stay_tied(dtype):
    model = built(dtype=dtype, extra="long buffer")
    kinds = {name: value.dtype for name, value in model.state_dict().items()}
    assert kinds.pop("table") == torch.float64 and kinds.pop("1.num_batches_tracked") == torch.int64
    assert set(kinds.values()) == {torch.float32}
    assert model[2].weight is model[0].weight and all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(model[1].weight, torch.ones(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, r"model 0.weight: weights are trained in fp32 \(got 'torch.float64'\)"),
        ({"dtype": "float32", "extra": "complex"}, "model phase: .*complex64"),
        ({"dtype": "float32", "extra": "integers"}, "model codes: .*int8.*are buffers"),
    ],
)
def test_weights_that_fp32_does_not_hold_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        built(**options)


class Frozen(nn.Module):
    """Freezes one part in the constructor, another by a `train` of its own."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
        self.neck = nn.Dropout()
        self.head = nn.Dropout()

    def train(self, mode=True):
        super().train(mode)
        self.neck.eval()
        return self


def training_of(model):
    return {name for name, module in model.named_modules() if module.training}


def test_what_is_built_in_evaluation_mode_stays_there_and_is_named():
    model = Frozen()
    assert modes.begin_training(model) == ["backbone"]
    assert training_of(model) == {"", "head"}


def test_a_model_that_comes_wholly_in_evaluation_mode_is_trained():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout())).eval()
    assert modes.begin_training(model) == []
    assert training_of(model) == {"", "0", "1", "1.0"}


def test_evaluating_gives_each_module_its_own_mode_back_also_after_an_error():
    model = Frozen()
    modes.begin_training(model)
    with pytest.raises(ZeroDivisionError), modes.evaluating(model):
        assert training_of(model) == set()
        raise ZeroDivisionError
    assert training_of(model) == {"", "head"}


def test_modes_are_put_back_whatever_has_changed_them():
    model = Frozen()
    modes.begin_training(model)
    before = modes.modes_of(model)
    nn.Module.train(model)
    modes.restore(before)
    assert training_of(model) == {"", "head"}
