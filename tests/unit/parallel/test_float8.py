"""What float8 needs is asked for before anything is built."""

import importlib.util

import pytest
import torch
from torch import nn

from kftrain.errors import ConfigError
from kftrain.parallel.float8 import list_linear_layers, require_float8
from kftrain.parallel.settings import ParallelConfig
from kftrain.parallel.shape import Shape

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"precision.compute: torchao is not installed.*kftrain\[float8\]"):
        require_float8(ParallelConfig(), Shape(), CPU)


def test_a_gpu_without_products_in_float8_is_refused(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="A100 has no products in float8"):
        require_float8(ParallelConfig(), Shape(), GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    require_float8(ParallelConfig(), Shape(), GPU)


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        ("ddp", Shape(replicate=2)),
        ("zero1", Shape(shard=2)),
        ("zero2", Shape(shard=2)),
        ("auto", Shape(shard=2)),
        ("fsdp", Shape(shard=2, replicate=2)),
        ("fsdp", Shape(tensor=2)),
        ("fsdp", Shape(expert=2)),
    ],
)
def test_layouts_without_a_row_are_refused(installed, strategy, shape):
    with pytest.raises(ConfigError, match="float8 is for one process, or fsdp"):
        require_float8(ParallelConfig(strategy=strategy), shape, CPU)


def test_one_process_and_fsdp_are_not(installed):
    require_float8(ParallelConfig(strategy="ddp"), Shape(), CPU)
    require_float8(ParallelConfig(), Shape(shard=4), CPU)


def test_layers_whose_sizes_16_divides_are_chosen():
    block = nn.ModuleList([nn.Linear(16, 32), nn.Linear(16, 24), nn.Linear(8, 16), nn.Embedding(16, 16)])
    assert list_linear_layers(block) == [block[0]]
