"""Llama 8 B and 70 B on a mesh of 512 processes, of which one is here: bytes of its shards against a closed formula."""

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kftrain.models.transformer import Transformer
from kftrain.parallel.activations import CheckpointActivations
from kftrain.parallel.initialize import places_of, take_memory_of_parameters
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.transforms import distribute, list_transforms
from kftrain.parallel.world import World

SIZE = 512


@dataclasses.dataclass(frozen=True)
class Llama:
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    num_parameters: int
    num_kv_heads: int = 8
    vocab_size: int = 128_256
    sequence_length: int = 8192


LLAMA_8B = Llama(4096, 32, 32, 14_336, 8_030_261_248)
LLAMA_70B = Llama(8192, 80, 64, 28_672, 70_553_706_496)


@contextlib.contextmanager
def fake_world(rank):
    """Process `rank` of 512 whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
    try:
        yield World(rank, SIZE, torch.device("cpu"), dist.group.WORLD, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def numbers_of_one_process(llama, settings, rank):
    """Numbers that a process keeps of the parameters; their number in all."""
    with fake_world(rank) as world, take_memory_of_parameters():
        arguments = dataclasses.asdict(llama)
        del arguments["num_parameters"]
        model = Transformer(**arguments)
        places = places_of(model)
        mesh = Mesh(settings.shape(SIZE), world)
        blocks = [f"model.layers.{layer}" for layer in range(llama.num_layers)]
        within = [CheckpointActivations("blocks", blocks)]
        strategy = list_transforms(settings, PrecisionConfig(compute="bf16"), within, mesh.shape, True)
        distribute(model, strategy, mesh, blocks)
        parameters = list(model.parameters())
        assert len(parameters) == len(places)
        assert all(
            isinstance(weight, DTensor) and weight.device_mesh == parameters[0].device_mesh for weight in parameters
        )
        assert all(weight.to_local().is_meta for weight in parameters)
        return sum(weight.to_local().numel() for weight in parameters), sum(weight.numel() for weight in parameters)


def formula(llama, shard, tensor, is_last):
    """A part of 1 / `tensor` of each matrix, of which each process of `shard` but the last has equally many rows."""

    def rows(count):
        each = -(-count // shard)
        return count - (shard - 1) * each if is_last else each

    key_width = llama.dim // llama.num_heads * llama.num_kv_heads
    columns = 2 * llama.ffn_dim, llama.dim, 2 * key_width  # gate and up, queries, keys and values
    layer = sum(rows(height // tensor) * llama.dim for height in columns)
    layer += rows(llama.dim) * (llama.dim + llama.ffn_dim) // tensor  # what leaves attention and feed-forward part
    ends = 2 * rows(llama.vocab_size // tensor) * llama.dim
    return llama.num_layers * layer + ends + (2 * llama.num_layers + 1) * rows(llama.dim)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(
    ("llama", "settings", "shard", "tensor", "num_bytes"),
    [
        (LLAMA_8B, {"tensor": 8}, 64, 8, 62_767_360),
        (LLAMA_70B, {"tensor": 8}, 64, 8, 551_305_728),
        (LLAMA_70B, {"tensor": 8, "replicate": 8}, 8, 8, 4_410_183_680),
    ],
    ids=["8 B, fsdp x tensor", "70 B, fsdp x tensor", "70 B, hsdp x tensor"],
)
def test_each_process_keeps_its_part_of_every_matrix(llama, settings, shard, tensor, num_bytes, is_last):
    """`num_bytes`: of the first process's master weights in fp32; gradients and AdamW's state are three times more."""
    local, whole = numbers_of_one_process(llama, ParallelConfig(**settings), SIZE - 1 if is_last else 0)
    assert whole == llama.num_parameters
    assert local == formula(llama, shard, tensor, is_last)
    assert is_last or 4 * local == num_bytes
