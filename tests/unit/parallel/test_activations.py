"""What blocks keep until the backward pass: the bytes of the formulas in docs/memory.md, and the same numbers."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from helpers.activations import Allocations
from torch import nn

from kftrain.errors import ConfigError
from kftrain.models.transformer import Transformer
from kftrain.parallel import activations
from kftrain.parallel.activations import CheckpointActivations, choose_checkpointed_blocks

LAYERS, DIM, FFN_DIM, ROWS, PLACES = 6, 64, 192, 4, 64
NAMES = [f"model.layers.{layer}" for layer in range(LAYERS)]

# Numbers that a block keeps for each token, dim D and inner width F, all heads alike; see docs/memory.md.
# All: the input and the sum with attention, each also normalised and scaled; query, key, value, what attention returns;
# gate, its activation, up, their product.
FULL = 10 * DIM + 4 * FFN_DIM
KEPT = {
    "none": lambda: LAYERS * FULL,
    "blocks": lambda: LAYERS * DIM,
    # Of seven products the first (query), fourth (output) and seventh (down) are computed again.
    "selective": lambda: LAYERS * (4 * DIM + 2 * FFN_DIM),
    "offload": lambda: 0,
}


class Parts:
    """As much of a distributed model as the transform asks for."""

    def __init__(self, model):
        self.model = model
        self.roots = nn.ModuleList([model])


def new_model():
    torch.manual_seed(0)
    return Transformer(vocab_size=16, sequence_length=PLACES, dim=DIM, num_layers=LAYERS, num_heads=4, ffn_dim=FFN_DIM)


def wrapped(model, method, names=NAMES):
    if method != "none":
        CheckpointActivations(method, names).apply(Parts(model), names)
    return model


def measure(method, monkeypatch, names=NAMES):
    """Numbers that are kept for each token after the blocks: the last one's output for the first one's input."""
    if method == "offload":  # numpy's memory is not seen, as the host's would not be on a GPU
        monkeypatch.setattr(activations, "copy_to_host", lambda tensor: tensor.detach().numpy().copy())
        monkeypatch.setattr(activations, "fetch_from_host", fetch)
    model, tokens = wrapped(new_model(), method, names), torch.zeros(ROWS, PLACES, dtype=torch.int64)
    with Allocations() as allocations:
        hidden = model.model.embed_tokens(tokens)
        inputs, before = model.stage_inputs(tokens), allocations.live
        tables = inputs.rotary(hidden)
        of_tables = sum(table.nbytes for table in tables)
        for layer in model.model.layers:
            hidden = layer(hidden, tables)
        return (allocations.live - before - of_tables) / (4 * ROWS * PLACES)


def fetch(kept):
    content, _ = kept
    return torch.from_numpy(content) if isinstance(content, np.ndarray) else content


@pytest.mark.parametrize("method", KEPT)
def test_a_policy_keeps_the_bytes_of_its_formula(method, monkeypatch):
    kept, expected = measure(method, monkeypatch), KEPT[method]()
    print(f"\n{method}: {kept / DIM:.2f} D, {kept / (LAYERS * FULL):.2f} of all; {expected / DIM:.2f} D")
    assert kept == pytest.approx(expected, rel=0.1, abs=1)


def test_less_is_kept_from_policy_to_policy(monkeypatch):
    kept = {method: measure(method, monkeypatch) for method in ("none", "selective", "blocks")}
    kept["every second"] = measure("blocks", monkeypatch, choose_checkpointed_blocks(NAMES, 2))
    assert kept["none"] > kept["every second"] > kept["selective"] > kept["blocks"]
    assert kept["selective"] <= 0.5 * kept["none"]
    expected = (KEPT["none"]() + KEPT["blocks"]()) / 2
    assert kept["every second"] == pytest.approx(expected, rel=0.1)


def test_recurrent_layers_are_not_recomputed_in_parts():
    with pytest.raises(ConfigError, match="recurrent layers overwrite"):
        wrapped(nn.Sequential(nn.LSTM(4, 4)), "selective", ["0"])


class Dropping(nn.Module):
    """A block that draws before, within and after what `selective` keeps."""

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, hidden):
        query, key, value = (layer(F.dropout(hidden, 0.2)) for layer in self.projections[:3])
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
        inner = F.gelu(self.projections[3](F.dropout(attended, 0.4)))
        return hidden + F.dropout(self.projections[4](inner), 0.5)


class Droppings(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Dropping() for _ in range(3))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().sum()


def gradients_of_dropping(*methods):
    gradients = []
    for each in methods:
        torch.manual_seed(1)
        model = wrapped(Droppings(), each, [f"layers.{number}" for number in range(3)])
        torch.manual_seed(2)
        model(torch.linspace(-1, 1, 96).view(2, 6, 8)).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return gradients


@pytest.mark.parametrize("method", ["blocks", "selective", "offload"])
def test_what_is_drawn_again_is_drawn_alike(method):
    assert torch.equal(*gradients_of_dropping("none", method))


@pytest.mark.parametrize("method", ["blocks", "selective"])
def test_with_other_draws_the_gradients_differ(method, monkeypatch):
    wrap = activations.checkpoint_wrapper
    monkeypatch.setattr(activations, "checkpoint_wrapper", functools.partial(wrap, preserve_rng_state=False))
    assert not torch.equal(*gradients_of_dropping("none", method))


def test_an_attention_that_drops_is_not_kept():
    drawing = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert activations._draws(drawing, (1, 2, 3, 0.1), {}) and activations._draws(
        drawing, (1, 2, 3), {"dropout_p": 0.1}
    )
    assert not activations._draws(drawing, (1, 2, 3), {}) and not activations._draws(drawing, (1, 2, 3, 0.0), {})


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4]), (9, [0]), ((4, "model.layers.[01]"), [0, 1, 4]), ((), [])],
)
def test_blocks_are_chosen_by_number_and_name(choice, chosen):
    assert choose_checkpointed_blocks(NAMES, choice) == [NAMES[number] for number in chosen]


@pytest.mark.parametrize(("names", "choice"), [(NAMES, (6,)), (NAMES, ("layers.*",)), ([], 1)])
def test_blocks_that_there_are_not_are_refused(names, choice):
    with pytest.raises(ConfigError, match=r"no such block|no blocks that could be recomputed"):
        choose_checkpointed_blocks(names, choice)


def test_what_a_block_changes_in_place_of_what_is_kept_is_not_silently_wrong():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)))
    wrapped(model, "selective", ["0"])
    with pytest.raises(ConfigError, match=r"changes in place what would be kept of it"):
        model(torch.ones(2, 4)).sum().backward()
