"""Units that are gathered matrix by matrix: the same numbers, whatever a unit does with its matrices."""

import torch
from helpers import ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from kftrain import config
from kftrain.models.transformer import Transformer
from kftrain.parallel import fully_shard
from kftrain.parallel.fully_shard import FullyShard
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import PrecisionConfig
from kftrain.parallel.shape import Shape
from kftrain.parallel.strategies import resolve_sharding
from kftrain.parallel.transforms import distribute, list_transforms

DIM = 6
BLOCKS = ("blocks.0", "blocks.1")
LAYERS = ("model.layers.0", "model.layers.1")


class Block(nn.Module):
    """Calls some of its modules, one of them twice, and reads the weights of others."""

    def __init__(self):
        super().__init__()
        self.called = nn.Linear(DIM, DIM)
        self.read = nn.Linear(DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.one = nn.Linear(DIM, DIM)
        self.other = nn.Linear(DIM, DIM)
        self.other.weight = self.one.weight
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(DIM)) for _ in range(2)])
        self.inner = nn.ModuleDict({"deep": nn.Sequential(nn.Linear(DIM, 7), nn.Linear(7, DIM))})
        self.scale = nn.Parameter(torch.randn(DIM))
        self.seen = []

    def forward(self, inputs):
        hidden = self.called(self.called(inputs)) + functional.linear(inputs, self.read.weight, self.read.bias)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0] * self.scale
        hidden = self.other(self.one(hidden)) + self.listed[0] * self.listed[1] + self.called.weight.sum()
        self.seen.append(not any(isinstance(parameter, DTensor) for parameter in self.parameters()))
        return self.inner["deep"](hidden)


class Model(nn.Module):
    """Its head has the weights of its embedding, and another matrix is read by name."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, DIM)
        self.blocks = nn.ModuleList(Block() for _ in BLOCKS)
        self.between = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = functional.linear(block(hidden), self.between.weight)
        return self.head(hidden)


def built():
    torch.manual_seed(5)
    return Model().eval()


def computed(world):
    """Outputs of three forwards; whether each block saw all of its weights; what is whole outside of forwards."""
    fully_shard.MIN_PIECE_BYTES = 1
    model = built()
    strategy = [FullyShard("fp32", "fp32", resolve_sharding("fsdp", "step"), forward_only=True)]
    distribute(model, strategy, Mesh(Shape(shard=world.size), world), BLOCKS)
    others_were_whole = []
    for block, other in (model.blocks, reversed(model.blocks)):
        block.register_forward_hook(
            lambda *_, other=other: others_were_whole.extend(
                name for name, each in other.named_parameters() if not isinstance(each, DTensor)
            )
        )
    with torch.no_grad():
        outputs = [model(tokens(number)) for number in range(3)]
    whole = [name for name, each in model.named_parameters() if not isinstance(each, DTensor)]
    units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    return outputs, [block.seen for block in model.blocks], whole + others_were_whole, units


def tokens(number):
    return torch.randint(0, 9, (2, 4), generator=torch.Generator().manual_seed(number))


def test_a_model_in_pieces_computes_what_it_computes_alone():
    model = built()
    with torch.no_grad():
        expected = [model(tokens(number)) for number in range(3)]
    for outputs, seen, whole, units in ranks.on(2, computed):
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
        assert seen == [[True] * 3] * 2 and whole == []
        parts = ["called", "read", "attention", "attention.out_proj", "inner.deep.0", "inner.deep.1"]
        within = {f"{block}.{part}" for block in BLOCKS for part in parts}
        assert units == {"", *BLOCKS, *within, "between"}


def transformer():
    torch.manual_seed(5)
    return Transformer(vocab_size=67, sequence_length=8, dim=32, num_layers=2, num_heads=4).eval()


def computed_by_split_matrices(world):
    """Logits over two shards of two parts of each matrix, and the units."""
    fully_shard.MIN_PIECE_BYTES = 1
    model, parallel = transformer(), config.parse("", ["parallel.tensor=2"]).parallel
    shape = parallel.shape(world.size)
    strategy = list_transforms(parallel, PrecisionConfig(), [], shape, forward_only=True)
    distribute(model, strategy, Mesh(shape, world), LAYERS)
    with torch.no_grad():
        return model(tokens(0)), {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def test_pieces_of_split_matrices_compute_what_one_process_does():
    with torch.no_grad():
        expected = transformer()(tokens(0))
    for logits, units in ranks.on(4, computed_by_split_matrices):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
        assert {f"{layer}.mlp.down_proj" for layer in LAYERS} < units


def test_small_modules_stay_in_their_unit():
    model = Model()
    assert fully_shard.find_pieces(model, model.blocks[0], []) == []
