"""The weights that a training starts with: those of a bare construction, in every layout, and nobody holds them all."""

import contextlib
import hashlib
import io
import random
import traceback

import numpy as np
import pytest
import torch
import torch._dynamo  # imported sooner or later by torch itself: no part of the memory that is measured
from helpers import ranks
from helpers.memory import peak_of_memory
from helpers.models import drawn as drawn_models
from helpers.models import odd as odd_models
from torch import nn
from torch.distributed.tensor import DTensor

from kftrain import config
from kftrain.parallel import initialize
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import build_task
from kftrain.train import optimizer, session

SEED = 7


class Tokens(odd_models.Task):
    """Rows of token ids."""

    def batch(self, arrays):
        return {"x": torch.from_numpy(np.abs(arrays["x"] * 8).astype(np.int64) % 11)}

    def loss(self, output, batch, weight):
        return (output.square().mean((1, 2)) * weight).sum()

    def statistics(self, output, batch):
        return {"sum": output.sum((1, 2))}


class Pixels(odd_models.Task):
    """Images of 2 x 2."""

    def batch(self, arrays):
        return {"x": torch.from_numpy(arrays["x"]).reshape(-1, 1, 2, 2)}


TRANSFORMER = ["model.kind=transformer", "model.vocab_size=11", "model.dim=12", "model.num_layers=2"]
TRANSFORMER += ["model.num_heads=2", "model.ffn_dim=10", f"task.kind={__name__}:Tokens"]
VISION = ["model.kind=vision_transformer", "model.image_size=2", "model.num_classes=3", "model.dim=12"]
VISION += ["model.num_layers=2", "model.patch_size=1", f"task.kind={__name__}:Pixels"]


def own(name):
    return [f"model.kind=helpers.models.drawn:{name}", "task.kind=helpers.models.odd:Task"]


def bare(model):
    """What every parameter of a model starts with."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little") >> 1
            torch.manual_seed(seed)
            parameter.data = torch.empty(parameter.shape)
            model.init_weights(name, parameter, torch.Generator().manual_seed(seed))
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def build(world, overrides):
    resolved = config.parse("{optimizer: {warmup_steps: 1}}", [f"run.seed={SEED}", *overrides])
    loader = odd_models.Loader(world)
    mesh = Mesh(resolved.parallel.shape(world.size), world)
    engine, _ = session.build(resolved, build_task(resolved.task), loader, mesh)
    return engine, loader


def found_in(world, overrides):
    """Weights, buffers and attributes before the first step, and the losses of two steps."""
    engine, loader = build(world, overrides)
    clean = lambda name: name.replace("_checkpoint_wrapped_module.", "")  # noqa: E731
    weights = {}
    for name, parameter in engine.model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert whole.dtype == torch.float32
        weights[clean(name)] = whole.detach().numpy().copy()
    buffers = {clean(name): buffer.numpy().copy() for name, buffer in engine.model.named_buffers()}
    kept = {name: value.numpy().copy() for name, value in vars(engine.model).items() if torch.is_tensor(value)}
    losses = [world.sum([float(engine.step(batch, 8, world.sum).local_loss_sum)])[0] for batch in loader.steps(0, 2)]
    return weights, buffers, kept, losses


LAYOUTS = {
    "one": (1, []),
    "two": (2, []),
    "replicated": (2, ["parallel.strategy=ddp"]),
    "recomputed": (2, ["train.activation_checkpointing=blocks"]),
    "hybrid": (4, ["parallel.replicate=2"]),
}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.parametrize("layout", ["one", *(pytest.param(each, marks=pytest.mark.slow) for each in ("hybrid", "two"))])
@pytest.mark.parametrize(
    ("overrides", "construct"),
    [
        (TRANSFORMER, lambda: transformer()),
        ([*TRANSFORMER, "model.tie_embeddings=true"], lambda: transformer(tie_embeddings=True)),
        (VISION, lambda: vision_transformer()),
        (own("Drawn"), drawn_models.Drawn),
    ],
    ids=["transformer", "tied", "vision", "odd"],
)
def test_weights_are_those_of_one_generator_for_each_name(overrides, construct, layout):
    size, settings = LAYOUTS[layout]
    expected = bare(construct())
    for weights, _, _, losses in ranks.on(size, found_in, [*overrides, *settings]):
        assert_same(weights, expected)
        assert np.isfinite(losses).all()


def transformer(**options):
    from kftrain.models.transformer import Transformer

    return Transformer(vocab_size=11, dim=12, num_layers=2, num_heads=2, ffn_dim=10, **options)


def vision_transformer():
    from kftrain.models.vision_transformer import VisionTransformer

    return VisionTransformer(image_size=2, num_classes=3, dim=12, num_layers=2, patch_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Drawn", "WithoutBlocks", "ReadsItsWeights"])
def test_every_layout_starts_alike_and_goes_on_alike(name):
    results = [ranks.on(size, found_in, [*own(name), *settings]) for size, settings in LAYOUTS.values()]
    ((weights, _, _, losses),) = results[0]
    assert_same(weights, bare(getattr(drawn_models, name)()))
    for other in (each for result in results for each in result):
        assert_same(other[0], weights)
        assert other[3] == pytest.approx(losses, rel=1e-5)


def test_tables_and_attributes_that_a_constructor_sets_are_there_and_tied_weights_stay_one():
    model, settings = drawn_models.Drawn(), ["train.activation_checkpointing=blocks"]
    expected = bare(drawn_models.Drawn())
    for weights, buffers, kept, _ in ranks.on(2, found_in, [*own("Drawn"), *settings]):
        assert "twin.weight" not in weights
        assert_same(weights, expected)
        assert_same(buffers, {"table": model.table.numpy()})
        assert_same(kept, {"offset": model.offset.numpy()})


def frozen(world):
    return {name for name, each in build(world, own("Drawn"))[0].model.named_parameters() if not each.requires_grad}


def test_a_parameter_that_needs_no_gradient_needs_none_afterwards():
    assert ranks.on(2, frozen) == [{"layers.2.bias"}] * 2


class ReachedError(Exception):
    """The model is there."""


def memory_of(world, overrides):
    """At the highest, from nothing to the model that is ready for an optimizer, which has twice its size for itself."""

    def reach(*_, **__):
        raise ReachedError

    optimizer.AdamW = reach  # of this process, which ends with the test
    with peak_of_memory() as found, contextlib.suppress(ReachedError):
        build(world, overrides)
    return found["bytes"]


MARGIN_BYTES = 16 << 20
"""For what is no weight: activations of two rows, buffers of gloo and of the matrix products, Python's own objects."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_process_holds_more_than_its_share_and_the_largest_block(size):
    block = 4 * drawn_models.Wide.WIDTH**2
    whole = drawn_models.Wide.COUNT * block
    peaks = ranks.on(size, memory_of, own("Wide"))
    mebibytes = [peak >> 20 for peak in peaks]
    assert all(whole / size <= peak <= whole / size + block + MARGIN_BYTES for peak in peaks), mebibytes


def seeded(construct):
    """A bare construction."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return construct()


class Seeded(odd_models.Stack):
    """Built by its constructor; from three generators."""

    def __init__(self):
        super().__init__()
        self.drawn = nn.Parameter(torch.from_numpy(np.random.normal(size=3)).float() * random.random())
        self.table = nn.Buffer(torch.randn(odd_models.DIM), persistent=False)

    def forward(self, x):
        return super().forward(x) + self.table + self.drawn.sum()


def found_and_said(world, overrides):
    """And what the process has printed on the way."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        weights, buffers, _, _ = found_in(world, overrides)
    return weights, buffers, printed.getvalue()


def test_a_model_without_init_weights_is_what_its_constructor_gives_on_one_process_wherever_it_is_trained():
    overrides = [f"model.kind={__name__}:Seeded", "task.kind=helpers.models.odd:Task"]
    model = seeded(Seeded)
    expected = {name: each.detach().numpy() for name, each in model.named_parameters()}
    for size, settings in (LAYOUTS["one"], LAYOUTS["two"], LAYOUTS["replicated"]):
        answers = ranks.on(size, found_and_said, [*overrides, *settings])
        for rank, (weights, buffers, printed) in enumerate(answers):
            assert_same(weights, expected)
            assert_same(buffers, {"table": model.table.numpy()})
            said = printed.count("built by its constructor on the first process")
            assert said == (rank == 0 and size > 1), printed


@pytest.mark.parametrize("layout", ["two", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_what_nobody_has_seeded_or_is_computed_from_weights_is_that_of_the_first_process(layout):
    size, settings = LAYOUTS[layout]
    first, *others = ranks.on(size, found_in, [*own("Built"), *settings])
    assert first[1].keys() == {"table", "noise", *(f"layers.0.parametrizations.weight.0._{each}" for each in "uv")}
    assert first[2].keys() == {"offset", "attribute"} and np.unique(first[2]["attribute"]).size == 6
    for other in others:
        for part in (0, 1, 2):
            assert_same(other[part], first[part])
        assert other[3] == first[3]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BufferOfWeights", "ConfigError: model start: a buffer is computed from weights"),
        ("Forgets", "UserCodeError: model.init_weights: gives no value to all of a parameter (got 'leave.bias')"),
        ("Calls", "ConfigError: model Calls.init_weights: init_weights must take a name, a parameter and a generator"),
        ("Lazy", "ConfigError: model lazy.weight: a lazy parameter has no shape"),
    ],
)
def test_what_cannot_be_initialised_is_refused_in_one_line_on_all_processes(name, message):
    for answer in ranks.on(2, found_in, own(name)):
        assert isinstance(answer, str) and answer.startswith(message) and "\n" not in answer, answer


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch formats no stack where there is a device")
def test_seeds_are_those_of_torch_without_a_stack_for_each_missing_device(monkeypatch):
    torch.manual_seed(7)
    expected = torch.rand(3)
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("it takes milliseconds"))
    assert torch.rand(3, generator=initialize.seed_all(7)).equal(expected)
