"""How a model is spread over the processes of an evaluation, and what becomes of one that cannot be spread so."""

import numpy as np
import pytest
import torch
from helpers import ranks
from helpers.exports import of_kind, state_of, write
from helpers.models import drawn as drawn_models
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from kftrain import config
from kftrain.checkpoint.export import read_empty
from kftrain.evaluate import layout
from kftrain.evaluate.layout import layouts, spread_out
from kftrain.evaluate.score import statistics_of
from kftrain.models.modes import evaluating
from kftrain.trust import Trust

TENSOR = ("evaluate.layout=training", "parallel.tensor=2")
LARGE = layout.COPIES_UP_TO_BYTES + 1
TRUST = Trust(frozenset({"helpers.models.drawn:Drawn", f"{__name__}:NoBlocks"}), schemes=frozenset({"file"}))


@pytest.mark.parametrize(
    ("overrides", "num_bytes", "num_processes", "expected"),
    [
        ([], 10, 4, ["copies"]),
        ([], LARGE, 1, ["copies"]),
        ([], LARGE, 4, [(1, 4, 1), "copies"]),
        (["parallel.strategy=auto"], LARGE, 4, [(1, 4, 1), "copies"]),
        (["parallel.replicate=2"], LARGE, 4, [(2, 2, 1), (1, 4, 1), "copies"]),
        (["parallel.tensor=2"], LARGE, 4, [(1, 2, 2), (1, 4, 1), "copies"]),
        (["parallel.strategy=ddp", "parallel.tensor=2"], LARGE, 4, [(1, 2, 2), (1, 4, 1), "copies"]),
        (["parallel.context=2"], LARGE, 4, [(1, 4, 1), "copies"]),
        (
            ["parallel.context=2", "parallel.shard=2", "parallel.replicate=2"],
            LARGE,
            8,
            [(2, 4, 1), (1, 8, 1), "copies"],
        ),
        (["parallel.context=2", "parallel.tensor=2"], LARGE, 8, [(1, 4, 2), (1, 8, 1), "copies"]),
        (["parallel.strategy=ddp"], LARGE, 4, ["copies"]),
        (["parallel.strategy=zero1"], LARGE, 4, ["copies"]),
        (["parallel.reshard_after_forward=false"], LARGE, 4, ["copies"]),
        (["evaluate.layout=training"], 10, 4, [(1, 4, 1), "copies"]),
        (["evaluate.layout=training", "parallel.strategy=zero2"], 10, 4, ["copies"]),
        (["evaluate.layout=copies"], LARGE, 4, ["copies"]),
    ],
)
def test_the_layout_is_that_of_the_training_where_the_model_is_large(overrides, num_bytes, num_processes, expected):
    found = layouts(config.parse("", overrides), num_bytes, num_processes)
    assert [axes_of(each, num_processes) for each in found] == expected


def axes_of(parallel, num_processes):
    if parallel is None:
        return "copies"
    shape = parallel.shape(num_processes)
    return shape.replicate, shape.shard, shape.tensor


def spread(world, uri, digest, overrides, said):
    """What a process has of the model: numbers in all, and whether it calls it together with others."""
    layout.to_log = said.append if world.is_main else lambda line: None
    found = spread_out(read_empty(uri, digest, TRUST), config.parse("", overrides), world)
    parameters = list(found.model.parameters())
    local = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in parameters)
    return local / sum(each.numel() for each in parameters), found.is_shared, found.mesh.shape.tensor, list(said)


@pytest.mark.parametrize(
    ("overrides", "share", "is_shared", "tensor"),
    [
        ([], 1.0, False, 1),
        (["evaluate.layout=training"], 0.5, True, 1),
        (["evaluate.layout=training", "parallel.tensor=2"], 0.55, True, 2),
    ],
    ids=["copies", "sharded", "tensor"],
)
def test_each_process_has_its_share(tmp_path, overrides, share, is_shared, tensor):
    options = {"dim": 16, "num_heads": 4, "ffn_dim": 24}.items()
    where = write(tmp_path / "e", state_of(options), 2, options)
    for local, shared, size, said in ranks.on(2, spread, *where, overrides, []):
        assert (shared, size, said) == (is_shared, tensor, []) and share - 0.06 <= local <= share + 0.06


class LargestLogits(TorchDispatchMode):
    """Counts the tokens whose logits are there at a time; the matrix, of 16 rows, looks like so many tokens."""

    def __init__(self, num_classes):
        super().__init__()
        self.num_classes = num_classes
        self.num_tokens = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        made = operation(*arguments, **(keywords or {}))
        if isinstance(made, torch.Tensor) and made.shape[-1:] == (self.num_classes,):
            self.num_tokens = max(self.num_tokens, made.numel() // self.num_classes)
        return made


def measure(world, uri, digest, overrides):
    """Statistics of some rows, tokens whose logits were there at a time, and what the model returns by itself."""
    empty = read_empty(uri, digest, TRUST)
    model = spread_out(empty, config.parse("", overrides), world).model
    tokens = np.random.default_rng(0).integers(0, 256, (4, 9)).astype(np.uint16)
    with evaluating(model), torch.no_grad(), LargestLogits(empty.task.model_arguments()["vocab_size"]) as largest:
        statistics = statistics_of(model, empty.task, {"tokens": tokens}, world.device)
        num_tokens = largest.num_tokens
        logits = model(torch.from_numpy(tokens[:, :-1].astype(np.int64)))
    return statistics, num_tokens, logits.numpy()


@pytest.mark.parametrize(
    ("num_processes", "tied", "layout", "num_tokens"),
    [(1, False, (), 20), (1, True, (), 20), (2, False, ("evaluate.layout=training",), 20), (2, False, TENSOR, 32)],
    ids=["one process", "tied", "sharded", "split logits are whole"],
)
def test_logits_are_scored_by_chunks_as_in_training_and_are_whole_for_others(
    tmp_path, num_processes, tied, layout, num_tokens
):
    options = {"dim": 16, "num_heads": 4, "ffn_dim": 24, "tie_embeddings": tied}.items()
    where = write(tmp_path / "e", state_of(options), 2, options)
    (wanted, num_whole, logits), *_ = ranks.on(num_processes, measure, *where, layout)
    assert num_whole == 32
    for statistics, largest, by_itself in ranks.on(
        num_processes, measure, *where, (*layout, "train.loss_chunk_tokens=20")
    ):
        assert largest == num_tokens
        np.testing.assert_array_equal(by_itself, logits)
        for name, values in wanted.items():
            np.testing.assert_allclose(statistics[name], values, rtol=1e-6, err_msg=name)


def test_a_model_that_does_not_name_its_output_layer_is_scored_from_whole_logits(tmp_path):
    state = {name: each for name, each in NoBlocks().state_dict().items()}
    (answer,) = ranks.on(
        1, spread, *of_kind(tmp_path / "e", state, f"{__name__}:NoBlocks"), ["train.loss_chunk_tokens=5"], []
    )
    assert answer[1:3] == (False, 1)


class NoBlocks(nn.Module):
    """Neither says how its matrices are split nor which of its parts are units."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)


@pytest.mark.parametrize(
    ("kind", "model", "is_shared", "num_lines"),
    [("helpers.models.drawn:Drawn", drawn_models.Drawn, True, 1), (f"{__name__}:NoBlocks", NoBlocks, False, 2)],
)
def test_a_model_that_cannot_be_spread_as_in_training_is_sharded_or_copied_and_a_line_says_why(
    tmp_path, kind, model, is_shared, num_lines
):
    state = {name: each for name, each in model().state_dict().items() if name != "twin.weight"}
    where = of_kind(tmp_path / "e", state, kind)
    one, two = ranks.on(2, spread, *where, ["evaluate.layout=training", "parallel.tensor=2"], [])
    assert one[1:3] == two[1:3] == (is_shared, 1)
    assert len(one[3]) == num_lines and all("cannot be spread as in training" in line for line in one[3]), one


def test_a_damaged_export_is_refused_on_all_processes(tmp_path):
    where = write(tmp_path / "e", state_of(), 2)
    path = tmp_path / "e" / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    for answer in ranks.on(2, spread, *where, ["evaluate.layout=training"], []):
        assert answer.startswith("CheckpointError") and "a file is damaged" in answer
