"""What is sharded as a unit of its own, and that all processes call it alike."""

import pytest
import torch
from torch import nn

from kftrain.errors import ConfigError, UserCodeError
from kftrain.parallel import blocks


class Body(nn.Module):
    """Layers that hold experts, and a list of nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(linears(8))}) for _ in range(2))
        self.empty = nn.ModuleList()
        self.heads = nn.ModuleList(linears(3))


def linears(count):
    return [nn.Linear(2, 2) for _ in range(count)]


class Naming(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.layers = nn.ModuleList(linears(3))
        self.head = nn.Linear(2, 2)
        self.choose = choose

    def blocks(self):
        return self.choose(self)


def test_lists_of_the_model_stand_before_lists_within_and_longer_ones_first():
    candidates = blocks.find_candidates(Body())
    assert not candidates.declared
    assert [len(names) for names in candidates.lists] == [3, 2, 8, 8]
    assert candidates.lists[1] == ["layers.0", "layers.1"]
    assert candidates.lists[3][0] == "layers.1.experts.0"


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda modules: nn.Sequential(*modules)])
def test_an_attribute_blocks_that_is_a_list_of_modules_is_that_list(kind):
    """As in timm's vision transformers and in DiT."""
    model = nn.Module()
    model.longer, model.blocks = nn.ModuleList(linears(5)), kind(linears(2))
    assert blocks.find_candidates(model).lists[0] == ["blocks.0", "blocks.1"]


def test_lists_that_share_a_parameter_with_the_rest_are_left_out():
    model = nn.Module()
    model.embedding, model.layers = nn.Embedding(2, 2), nn.ModuleList(linears(2))
    model.layers[1].weight = model.embedding.weight
    assert blocks.find_candidates(model).lists == []


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda model: [nn.Linear(1, 1)], "names what is no part of the model"),
        (lambda model: [model], "names what is no part of the model"),
        (lambda model: [3], "names what is no part of the model"),
        (lambda model: [model.layers, model.layers[0]], "layers.0 and layers have a module in common"),
    ],
)
def test_blocks_that_cannot_be_units_are_refused(choose, message):
    with pytest.raises(ConfigError, match=rf"model.blocks: {message}"):
        blocks.find_candidates(Naming(choose))


def test_a_parameter_of_two_blocks_is_refused_by_name():
    model = Naming(lambda model: list(model.layers))
    model.layers[2].bias = model.layers[0].bias
    with pytest.raises(ConfigError, match=r"layers.2 and layers.0 have the parameter layers.2.bias in common"):
        blocks.find_candidates(model)


def test_one_block_that_stands_twice_in_the_list_is_one_unit():
    model = Naming(lambda model: [model.layers[0], model.layers[0]])
    assert blocks.find_candidates(model).lists == [["layers.0"]]


ONCE = ["", "a", "b"]
DECLARED, FOUND = blocks.Candidates(True, [["a", "b"]]), blocks.Candidates(False, [["c", "d"], ["a", "b"]])


@pytest.mark.parametrize(
    ("seen", "names"),
    [
        ([ONCE, ONCE], ["a", "b"]),
        ([[*ONCE, *ONCE], [*ONCE, *ONCE]], ["a", "b"]),
        ([["", "c", "d", "a", "b"], ["", "c", "d", "b", "a"]], ["c", "d"]),
        ([["", "c", "a", "b"]], ["a", "b"]),
        ([ONCE, ["", "b", "a"]], []),  # another order on another process
        ([ONCE, ["", "a", "a"]], []),
        ([["", "a"], ["", "b"]], []),  # experts
        ([["", "a", "b", "a"]], []),
        ([["", "a", "", "b"]], []),  # not all of them in each forward
    ],
)
def test_a_list_is_taken_when_each_element_is_called_once_on_every_process(seen, names):
    assert blocks.choose_blocks(FOUND, seen) == names


def test_blocks_that_a_model_names_may_be_called_more_than_once_if_all_processes_do_so():
    assert blocks.choose_blocks(DECLARED, [["", "a", "b", "a"]] * 2) == ["a", "b"]


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ([["", "a"], ["", "a"]], "model.blocks: names a module whose forward is not called .*'b'"),
        ([ONCE, ["", "a"]], "not called in each forward of the model .*'b'"),
        ([ONCE, ["", "b", "a"]], "do not call the same blocks in the same order"),
    ],
)
def test_named_blocks_that_processes_call_differently_are_refused(seen, message):
    with pytest.raises(ConfigError, match=message):
        blocks.choose_blocks(DECLARED, seen)


def test_one_process_alone_may_leave_a_block_out_now_and_then():
    assert blocks.choose_blocks(DECLARED, [["", "a"]]) == ["a", "b"]


def test_the_log_has_the_calls_in_order_and_ends():
    model = nn.Sequential(*linears(3))
    log = blocks.CallLog(model, ["2", "0"])
    model(torch.zeros(2))
    model[0](torch.zeros(2))
    assert log.take() == ["", "0", "2", "0"] and log.take() == []
    log.close()
    model(torch.zeros(2))
    assert log.take() == []


def test_calls_that_differ_from_the_first_ones_name_the_block():
    blocks.require_same_calls(ONCE, list(ONCE))
    for calls, shown in ([["", "a"], "b: 0 times, not 1"], [["", "b", "a"], "the model"], [[*ONCE, "a"], "a: 2 times"]):
        with pytest.raises(UserCodeError, match=f"model.forward: the blocks are not called as.*{shown}"):
            blocks.require_same_calls(ONCE, calls)
