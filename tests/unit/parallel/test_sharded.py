"""What is made of whole matrices: the same on each process, and each matrix is computed once."""

import pytest
import torch
import torch.distributed as dist
from helpers import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from kftrain.parallel.sharded import ALONE, Team, apply_to_whole, index_of, local

SHAPES = [(5, 3), (1, 4), (4, 6), (2, 2), (7, 1)]
ROWS, COLUMNS, SAME = Shard(0), Shard(1), Replicate()


def made_of(matrix):
    """Depends on all numbers and on their places; is not contiguous."""
    return (matrix @ matrix.T @ matrix).T.contiguous().T


def matrices(dtype):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def computed(world, sizes, placements, dtype, has_replicas=True):
    """Whether the parts are those of what one process makes; how many numbers this process has computed with."""
    whole = matrices(dtype)
    mesh = init_device_mesh("cpu", sizes) if placements else None
    like = [distribute_tensor(matrix, mesh, placements) if placements else matrix for matrix in whole]
    worked = []

    def work(matrix):
        worked.append(tuple(matrix.shape))
        return made_of(matrix)

    replicas = Team((dist.group.WORLD,)) if has_replicas else ALONE
    results = apply_to_whole([local(matrix).clone() for matrix in like], like, work, replicas)
    expected = [made_of(each)[index_of(one)] for each, one in zip(whole, like, strict=True)]
    return all(torch.equal(one, other) for one, other in zip(results, expected, strict=True)), worked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((2,), None),
        ((3,), None),
        ((2,), (ROWS,)),
        ((3,), (COLUMNS,)),
        ((2, 2), (SAME, ROWS)),
        ((2, 2), (ROWS, COLUMNS)),
        ((2, 2), (SAME, COLUMNS)),
        ((2, 2), (SAME, SAME)),
        ((1, 2), (SAME, COLUMNS)),
    ],
    ids=str,
)
def test_each_matrix_is_computed_by_one_process(sizes, placements, dtype):
    answers = ranks.on(torch.Size(sizes).numel(), computed, sizes, placements, dtype)
    assert all(equal for equal, _ in answers)
    assert sorted(shape for _, worked in answers for shape in worked) == sorted(SHAPES)
    assert max(len(worked) for _, worked in answers) <= -(-len(SHAPES) // len(answers)) + 1


def test_a_process_without_replicas_asks_nobody():
    assert computed(None, None, None, torch.float32, False) == (
        True,
        sorted(SHAPES, key=lambda each: each[0] * each[1]),
    )
