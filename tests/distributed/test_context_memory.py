"""Memory of a step with a long row: two processes that share it, or split the matrices, against one that has all."""

import math

import numpy as np
import pytest
import torch
from helpers import ranks
from helpers.memory import peak_of_memory, peak_of_tensors
from helpers.parity.context import DOCUMENT
from helpers.parity.rank import new_loader

from kftrain import config
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import build_task
from kftrain.train import session

pytestmark = pytest.mark.slow

MAX_SHARE = 0.55
TEXT = """
task: {kind: language_modeling, tokenizer: bytes}
model: {kind: transformer, dim: 128, num_layers: 2, num_heads: 2}
train: {steps: 1, global_batch_size: 1}
"""
CONTEXT = ("parallel.context=2",)
GATHERED = ("model.num_kv_heads=1",)
DOCUMENTS = ("task.attention=documents",)


def one_row(length):
    tokens = np.random.default_rng(0).integers(97, 123, (1, length + 1)).astype(np.uint16)
    tokens[:, ::3001] = DOCUMENT
    return {"tokens": tokens}


def peak_of_a_training(world, length, overrides, peak_in_step=peak_of_memory):
    """Peaks of this process's memory, while the engine is built and within a step, and the step's loss."""
    torch.set_num_threads(1)
    resolved = config.parse(TEXT, [f"task.sequence_length={length}", *overrides])
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    loader = new_loader(resolved, task, mesh, one_row(length))
    with peak_of_memory() as while_built:
        engine, _ = session.build(resolved, task, loader, mesh)
    (batch,) = loader.steps(0, 1)
    with peak_in_step() as in_step:
        loss = engine.step(batch, length, world.sum).local_loss_sum.item()
    return while_built["bytes"], in_step["bytes"], loss


# Time grows with the square of the length. Where keys are gathered, only a longer row shows half of the memory.
@pytest.mark.parametrize("overrides", [DOCUMENTS, (*DOCUMENTS, *GATHERED), (), GATHERED], ids=str)
def test_each_of_two_processes_has_half_of_what_one_needs(overrides):
    length = 24_576 if "model.num_kv_heads=1" in overrides else 16_384
    ((built_alone, alone, loss),) = ranks.on(1, peak_of_a_training, length, overrides, seconds=900)
    shared = ranks.on(2, peak_of_a_training, length, (*CONTEXT, *overrides), seconds=900)
    built, in_step, losses = zip(*shared, strict=True)
    print(f"\n{overrides}: {max(in_step) / alone:.3f} of {alone / 2**20:.0f} MiB")
    assert math.isclose(sum(losses), loss, rel_tol=1e-5)
    assert max(in_step) <= MAX_SHARE * alone, (shared, alone)
    assert max(built) <= MAX_SHARE * built_alone, (shared, built_alone)
    assert alone > length << 14, "it is the sequence that takes the memory"


def test_each_of_two_processes_that_split_matrices_has_half_of_what_one_needs_and_what_is_gathered():
    length, wide = 4096, ("model.dim=256",)
    ((_, alone, loss),) = ranks.on(1, peak_of_a_training, length, wide, peak_of_tensors, seconds=300)
    split = ranks.on(2, peak_of_a_training, length, (*wide, "parallel.tensor=2"), peak_of_tensors, seconds=300)
    _, in_step, losses = zip(*split, strict=True)
    print(f"\ntensor: {max(in_step) / alone:.3f} of {alone / 2**20:.0f} MiB")
    assert math.isclose(losses[0], loss, rel_tol=1e-5)
    # Whole on each process: the input of a product, its gradient, and the terms of a sum before they are scattered.
    gathered = 3 * length * 256 * 4
    assert max(in_step) <= alone / 2 + gathered, (split, alone)
    assert alone > length << 14, "it is the sequence that takes the memory"
