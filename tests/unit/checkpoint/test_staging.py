"""The copy that training waits for: once, whole, and into memory that is used again."""

import pytest
import torch
from helpers import checkpoints
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kftrain.checkpoint.staging import Staging

COPIES = ("copy_", "clone", "_to_copy")


class Copied(TorchDispatchMode):
    """Counts the bytes that are copied."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function._schema.name.removeprefix("aten::") in COPIES:
            self.num_bytes += result.nbytes
        return result


@pytest.fixture(scope="module")
def state():
    with checkpoints.alone():
        mesh = init_device_mesh("cpu", (1,))
        torch.manual_seed(0)
        yield {
            "model": {
                "sharded": distribute_tensor(torch.rand(64, 32), mesh, [Shard(0)]),
                "replicated": distribute_tensor(torch.rand(7), mesh, [Replicate()]),
                "plain": torch.rand(5, 6, dtype=torch.float64),
                "view": torch.rand(100)[10:20],
                "transposed": torch.rand(4, 8).t(),
                "empty": torch.empty(0, 3),
                "parameter": torch.nn.Parameter(torch.rand(3)),
                "bf16": torch.rand(9).bfloat16(),
            },
            "optimizer": {"step": torch.tensor(3.0), "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "note": None},
        }


def tensors(value, place=""):
    if isinstance(value, DTensor):
        yield place, value.to_local()
    elif isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from tensors(item, f"{place}/{key}")


def test_the_copy_has_the_same_content_and_layout_and_shares_nothing(state):
    copied = Staging().copy_of(state)
    ours, theirs = dict(tensors(copied)), dict(tensors(state))
    assert ours.keys() == theirs.keys()
    for place, tensor in theirs.items():
        assert torch.equal(ours[place], tensor), place
        assert (ours[place].dtype, ours[place].device.type) == (tensor.dtype, "cpu"), place
        assert not ours[place].numel() or ours[place].data_ptr() != tensor.data_ptr(), place
        # else DCP copies it once more when it writes
        assert ours[place].untyped_storage().size() == ours[place].nbytes, place
    for name in ("sharded", "replicated"):
        ours, theirs = copied["model"][name], state["model"][name]
        assert (ours.placements, ours.device_mesh, ours.shape) == (theirs.placements, theirs.device_mesh, theirs.shape)
    assert copied["optimizer"]["groups"] == state["optimizer"]["groups"]
    assert copied["optimizer"]["groups"] is not state["optimizer"]["groups"]


def test_every_byte_is_copied_once(state):
    with Copied() as copied:
        Staging().copy_of(state)
    assert copied.num_bytes == sum(tensor.nbytes for _, tensor in tensors(state))


def test_the_next_copy_uses_the_memory_of_the_one_before(state):
    staging = Staging()
    first = {place: tensor.data_ptr() for place, tensor in tensors(staging.copy_of(state))}
    with torch.no_grad():
        state["model"]["plain"].add_(1)
    second = staging.copy_of(state)
    assert {place: tensor.data_ptr() for place, tensor in tensors(second)} == first
    assert torch.equal(second["model"]["plain"], state["model"]["plain"])


def test_a_tensor_that_has_changed_its_shape_or_type_has_new_memory():
    staging = Staging()
    staging.copy_of({"a": torch.zeros(3), "b": torch.zeros(3)})
    changed = staging.copy_of({"a": torch.ones(4), "b": torch.ones(3, dtype=torch.float64)})
    assert torch.equal(changed["a"], torch.ones(4))
    assert changed["b"].dtype == torch.float64


def test_names_with_a_separator_do_not_meet():
    copied = Staging().copy_of({"a": {"b/c": torch.zeros(2)}, "a/b": {"c": torch.ones(2)}})
    assert torch.equal(copied["a"]["b/c"], torch.zeros(2))
    assert torch.equal(copied["a/b"]["c"], torch.ones(2))
