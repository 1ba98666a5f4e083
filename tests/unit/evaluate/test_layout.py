"""How a model is spread over the processes of an evaluation, and what becomes of one that cannot be spread so."""

import pytest
from helpers import ranks
from helpers.exports import of_kind, state_of, write
from helpers.models import drawn as drawn_models
from torch import nn
from torch.distributed.tensor import DTensor

from kftrain import config
from kftrain.checkpoint.export import read_empty
from kftrain.evaluate import layout
from kftrain.evaluate.layout import layouts, spread_out
from kftrain.trust import Trust

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
