"""What a model says about how it is split, and what is refused before anything is split."""

import pytest
from torch import nn

from kftrain.errors import ConfigError
from kftrain.models.transformer import Transformer
from kftrain.models.vision_transformer import VisionTransformer
from kftrain.parallel.tensor_plan import SplitModule, is_gathered, read_plan


class Net(nn.Module):
    def __init__(self, plan, sizes=None):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.sparse = nn.Embedding(12, 8, sparse=True)
        self.block = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8), "norm": nn.LayerNorm(8)})
        self.plan = plan
        self.sizes = sizes or {}

    def tensor_plan(self):
        return self.plan

    def tensor_sizes(self):
        return self.sizes


def test_patterns_become_modules_and_the_first_that_fits_counts():
    plan = read_plan(Net({"block.u*": "column/3", "block.norm": "sequence", "block.*": "row"}), 2, True)
    assert plan == {
        "block.up": SplitModule("column", 3),
        "block.norm": SplitModule("sequence"),
        "block.down": SplitModule("row"),
    }


def test_a_module_is_gathered_where_one_above_it_is():
    plan = {"a": SplitModule("gather"), "a.b": SplitModule("column"), "ab": SplitModule("column")}
    assert [is_gathered(name, plan) for name in plan] == [False, True, False]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([], r"model.tensor_plan: is no plan \(got 'list'\)"),
        ({}, r"model.tensor_plan: is no plan"),
        ({"blocks.*": "column"}, r"model.tensor_plan: names no module of the model \(got 'blocks.\*'\)"),
        ({"block.up": "colum"}, r"knows no such kind \(got 'block.up: colum'\).*column, row"),
        ({"block.up": 3}, r"knows no such kind \(got 'block.up: 3'\)"),
        ({"block.norm": "column"}, r"column is for nn.Linear \(got 'block.norm: LayerNorm'\)"),
        ({"block.up": "vocabulary"}, r"vocabulary is for nn.Embedding \(got 'block.up: Linear'\)"),
        ({"block.up": "random"}, r"random is for nn.Dropout"),
        ({"sparse": "vocabulary"}, r"an embedding with max_norm, sparse or .* cannot be split \(got 'sparse'\)"),
        ({"block.down": "column/3"}, r"has no 3 matrices of equal size \(got 'block.down'\)"),
    ],
)
def test_a_plan_that_is_none_is_refused(plan, message):
    with pytest.raises(ConfigError, match=message):
        read_plan(Net(plan), 2, True)


@pytest.mark.parametrize(
    ("plan", "sizes", "count", "message"),
    [
        (
            {"block.up": "column"},
            {},
            5,
            r"model block.up.weight: has no 5 equal parts, .* \(got 12\).* such as 15.*: 1",
        ),
        ({"block.up": "column/3"}, {}, 8, r"model block.up.weight: .* \(got 4\).* such as 8, or parallel.tensor: 4"),
        ({"block.down": "row"}, {}, 8, r"model block.down.weight: .* \(got 12\).* such as 16, or parallel.tensor: 4"),
        ({"table": "vocabulary"}, {}, 8, r"model table.weight: is too few for 8 processes"),
        (
            {"block.up": "column"},
            {"heads": 6},
            4,
            r"model heads: has no 4 .* \(got 6\).* such as 8.*parallel.tensor: 2",
        ),
        (
            {"block.up": "column"},
            {"sequence_length": 7},
            2,
            r"sequence_length: .* or parallel.sequence_parallel: false",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(plan, sizes, count, message):
    with pytest.raises(ConfigError, match=message):
        read_plan(Net(plan, sizes), count, True)


def test_a_sequence_that_is_not_split_may_have_any_length():
    assert read_plan(Net({"block.up": "column"}, {"sequence_length": 7}), 2, False)


def test_a_model_without_a_plan_is_refused():
    with pytest.raises(
        ConfigError, match=r"parallel.tensor: Linear has no plan of how to split its matrices \(got 2\)"
    ):
        read_plan(nn.Linear(2, 2), 2, True)


@pytest.mark.parametrize(
    ("options", "count", "named"),
    [
        ({"num_kv_heads": 2}, 4, "num_kv_heads"),
        ({"num_heads": 6, "dim": 48}, 4, "num_heads"),
        ({"ffn_dim": 36}, 8, "ffn_dim"),
        ({"sequence_length": 6}, 4, "sequence_length"),
    ],
)
def test_the_transformer_names_the_option_that_does_not_divide(options, count, named):
    defaults = {"vocab_size": 320, "sequence_length": 8, "dim": 64, "num_heads": 8, "ffn_dim": 64, "num_layers": 1}
    with pytest.raises(ConfigError, match=f"model {named}: has no {count} equal parts"):
        read_plan(Transformer(**{**defaults, **options}), count, True)


def test_a_vision_transformer_whose_patches_do_not_divide_is_split_over_whole_sequences():
    model = VisionTransformer(image_size=6, num_classes=3, num_heads=2, dim=8, num_layers=1)
    with pytest.raises(ConfigError, match="sequence_length"):
        read_plan(model, 2, True)
    assert read_plan(model, 2, False)["layers.0.qkv"] == SplitModule("column", 3)


@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_of_the_transformer_is_split(tied):
    model = Transformer(vocab_size=320, num_layers=2, tie_embeddings=tied)
    plan = read_plan(model, 2, True)
    split = ("column", "row", "vocabulary", "logits")
    for name, parameter in model.named_parameters():
        part = plan[name.rpartition(".")[0]]
        assert part.kind in split if parameter.dim() > 1 else part.kind == "sequence", name
