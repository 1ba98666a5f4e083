"""A checkpoint writer in this process, or in one of two, without a training around it."""

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from kftrain.checkpoint.save import CheckpointWriter, Identity
from kftrain.parallel.world import World

TIMEOUT = timedelta(seconds=600)
"""Of the collectives."""


@contextlib.contextmanager
def alone():
    """The world of one process."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=TIMEOUT)
    try:
        yield world(0, 1)
    finally:
        dist.destroy_process_group()


def one_of_two(folder, rank):
    """Joins another process; what they share is a folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=TIMEOUT)
    return world(rank, 2)


def world(rank, size):
    groups = [dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2)]
    return World(rank, size, torch.device("cpu"), *groups)


def writer_of(paths, world, attempt=1, keep_last=9, **options):
    return CheckpointWriter(paths, world, Identity(attempt, "d", "t", {}), keep_last, 0, **options)


def state(fill=1.0, numel=10_000):
    return {"model": {"weight": torch.full((numel,), float(fill))}, "optimizer": {"step": 3}}


def save(writer, step, fill=None):
    """A whole save, waited for."""
    writer.save(state(step if fill is None else fill), [{"step": step}], step, 4 * step)
    writer.wait()
