"""Number formats on a GPU: what no CPU can show."""

import pytest
import torch

from kftrain.parallel.float8 import FIRST_CAPABILITY
from kftrain.parallel.settings import LossScaleConfig, PrecisionConfig
from kftrain.train.loss_scale import LossScale
from kftrain.train.numerics import set_numerics
from kftrain.train.rounding import round_by_chance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def safe():
    yield
    set_numerics(PrecisionConfig())


def test_the_scale_is_that_of_torchs_scaler():
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    mine = LossScale(LossScaleConfig(initial=2.0**10, growth_interval_steps=2), torch.device("cuda"))
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflows in (0, 0, 1, 0, 1, 1, 0, 0, 0, 0):
        expected = scaler.get_scale()
        scaler.scale(weight.sum() * (torch.inf if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert float(mine.update(torch.tensor(float(overflows), device="cuda"))["loss_scale"]) == expected


def test_a_product_in_fp32_is_one_unless_tf32_is_chosen():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator, dtype=torch.float64) for _ in range(2))
    errors = {}
    for tf32 in (False, True):
        set_numerics(PrecisionConfig(tf32=tf32))
        product = left.float().cuda() @ right.float().cuda()
        errors[tf32] = float((product.cpu().double() - left @ right).norm() / (left @ right).norm())
    assert errors[False] < 1e-6
    if torch.cuda.get_device_capability() >= (8, 0):
        assert errors[True] > 1e-5


def test_rounding_by_chance_is_right_in_the_mean():
    numbers = torch.full((200_000,), 1.0 + 2.0**-10, device="cuda")
    rounded = round_by_chance(numbers, torch.Generator("cuda").manual_seed(1)).double()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(float(rounded.mean()) - (1.0 + 2.0**-10)) < 5 * 2.0**-7 * (7 / 64 / 200_000) ** 0.5


def test_products_in_float8_are_those_that_the_cpu_emulates():
    float8 = pytest.importorskip("torchao.float8", reason="the extra float8 is not installed")
    if torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        pytest.skip(f"{torch.cuda.get_device_name()} has no products in float8")
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).bfloat16().to(device)
        made = float8.convert_to_float8_training(net, config=float8.Float8LinearConfig(emulate=device == "cpu"))
        rows = torch.linspace(-1, 1, 16 * 64).view(16, 64).bfloat16().to(device)
        made(rows).float().square().sum().backward()
        results.append(made[0].weight.grad.float().cpu())
    torch.testing.assert_close(results[1], results[0], rtol=0.05, atol=0.05 * float(results[0].abs().max()))
