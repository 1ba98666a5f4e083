import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kftrain.errors import ConfigError
from kftrain.models.vision_transformer import VisionTransformer

SIZES = {"image_size": 8, "num_channels": 3, "num_classes": 5, "dim": 32, "num_layers": 2, "num_heads": 4}


def build(seed=0, **options):
    torch.manual_seed(seed)
    return VisionTransformer(**{**SIZES, **options})


def perturbed(model):
    with torch.no_grad():  # the classifier starts at zero, which would hide everything behind it
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def test_an_image_does_not_depend_on_the_rest_of_its_batch():
    model, images = perturbed(build()), torch.randn(6, 3, 8, 8)
    with torch.no_grad():
        together, alone = model(images), torch.cat([model(image[None]) for image in images])
    assert together.shape == (6, 5) and together.std() > 0.01
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_every_pixel_and_its_place_matter():
    model = perturbed(build())
    images = torch.randn(1, 3, 8, 8, requires_grad=True)
    model(images)[0, 0].backward()
    assert (images.grad != 0).all()
    swapped = images.detach().roll(4, dims=2)
    assert not torch.allclose(model(images.detach()), model(swapped), atol=1e-4)


def test_attention_is_that_of_torch():
    block = perturbed(build()).layers[0]
    oracle = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    oracle.load_state_dict(
        {
            "in_proj_weight": block.qkv.weight,
            "in_proj_bias": block.qkv.bias,
            "out_proj.weight": block.project.weight,
            "out_proj.bias": block.project.bias,
        }
    )
    hidden = torch.randn(2, 16, 32)
    expected, _ = oracle(hidden, hidden, hidden)
    torch.testing.assert_close(block._attend(hidden), expected, atol=1e-5, rtol=1e-5)


def test_matrices_are_spread_by_their_sizes_biases_are_zero_and_norms_one():
    for name, parameter in build(dim=64).named_parameters():
        values = parameter.detach()
        if name.startswith("head.") or name.endswith(".bias"):
            assert not values.any(), name
        elif "norm" in name:
            assert (values == 1).all(), name
        elif name == "position_embedding":
            assert values.std() == pytest.approx(0.02, rel=0.1)
        else:
            fan_out, fan_in = parameter.shape[0], parameter[0].numel()
            if parameter.dim() == 4:
                fan_out *= parameter[0, 0].numel()
            limit = (6 / (fan_in + fan_out)) ** 0.5
            assert 0.9 * limit < values.abs().max() <= limit, name


def test_an_untrained_model_is_undecided():
    assert torch.equal(build()(torch.randn(2, 3, 8, 8)), torch.zeros(2, 5))


def test_dropout_acts_in_training_only():
    model, images = perturbed(build(dropout=0.5)), torch.randn(2, 3, 8, 8)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def test_the_exported_configuration_rebuilds_the_network():
    model = build(patch_size=4, mlp_ratio=3, dropout=0.25)
    config = model.export_config()
    assert config.pop("model_type") == "vision_transformer"
    rebuilt = VisionTransformer(**config)
    rebuilt.load_state_dict(model.state_dict())
    assert rebuilt.export_config() == model.export_config()


def test_flops_are_those_of_the_matrix_products():
    model = build()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert model.num_flops(4) == pytest.approx(counter.get_total_flops(), rel=0.1)


@pytest.mark.parametrize(
    ("options", "where"), [({"patch_size": 3}, "model.patch_size"), ({"num_heads": 5}, "model.num_heads")]
)
def test_sizes_that_do_not_fit_each_other_are_refused(options, where):
    with pytest.raises(ConfigError) as raised:
        build(**options)
    assert raised.value.where == where
