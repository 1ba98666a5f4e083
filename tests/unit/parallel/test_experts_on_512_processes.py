"""A mixture of experts of 400 B on a mesh of 512 processes, of which one is here: bytes of its parts by a formula."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kftrain.models.mixture_of_experts import MixtureOfExperts
from kftrain.parallel.initialize import take_memory_of_parameters
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.transforms import distribute, list_transforms
from kftrain.parallel.world import World

SIZE = 512
MODEL = {
    "vocab_size": 131_072,
    "sequence_length": 8192,
    "dim": 6144,
    "num_layers": 60,
    "num_heads": 48,
    "num_kv_heads": 8,
    "num_experts": 128,
    "experts_per_token": 8,
    "expert_dim": 2816,
}


@contextlib.contextmanager
def fake_world(rank):
    """Process `rank` of 512 whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
    try:
        yield World(rank, SIZE, torch.device("cpu"), dist.group.WORLD, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def numbers_of_one_process(settings, rank):
    """Numbers that a process keeps of experts and of the rest; those of all; the units of FSDP."""
    with fake_world(rank) as world, take_memory_of_parameters():
        model = MixtureOfExperts(**MODEL)
        mesh = Mesh(settings.shape(SIZE), world)
        strategy = list_transforms(settings, PrecisionConfig(compute="bf16"), [], mesh.shape)
        distribute(model, strategy, mesh, [f"model.layers.{layer}" for layer in range(60)])
        found = SimpleNamespace(experts=0, rest=0, whole=0, units=0)
        for name, weight in model.named_parameters():
            assert isinstance(weight, DTensor) and weight.to_local().is_meta
            found.whole += weight.numel()
            if ".mlp.experts." in name:
                assert weight.device_mesh.mesh_dim_names[-1] == "expert"
                found.experts += weight.to_local().numel()
            else:
                found.rest += weight.to_local().numel()
        found.units = sum(isinstance(module, FSDPModule) for module in model.modules())
        return found


@pytest.mark.parametrize("rank", [0, SIZE - 1])
@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [
        ({"expert": 64}, 3_169_622_160),
        ({"expert": 128}, 3_169_622_160),
        ({"expert": 8, "replicate": 8}, 25_348_127_040),
    ],
    ids=["64 of experts, 8 of shards", "128 of experts, 4 of shards", "8 of experts, 8 of shards, 8 copies"],
)
def test_each_process_keeps_its_part_of_its_experts_and_of_the_rest(settings, num_bytes, rank):
    """`num_bytes`: of a process's master weights in fp32; gradients and AdamW's state are three times more."""
    found = numbers_of_one_process(ParallelConfig(**settings), rank)
    num_shards = SIZE // settings.get("replicate", 1)
    experts = 60 * 128 * 3 * 6144 * 2816
    attention = 60 * 6144 * (2 * 6144 + 2 * 8 * 128)
    ends = 2 * 131_072 * 6144
    assert found.whole == experts + attention + ends + 60 * (128 * 6144 + 2 * 6144 + 2 * 128) + 6144
    assert 390e9 < found.whole < 410e9
    assert found.units == 60 * 2 + 1
    assert found.experts == experts // num_shards  # equal parts, though a process has fewer experts than share them
    gates = 60 * -(-128 // num_shards) * 6144
    norms = 60 * (2 * 6144 // num_shards + 2 * -(-128 // num_shards)) + 6144 // num_shards
    rest = (attention + ends) // num_shards + norms
    if rank == 0:
        assert found.rest == rest + gates
        assert 4 * (found.experts + found.rest) == num_bytes
    else:
        assert found.rest <= rest + gates
