"""The engine broken on purpose, one thing at a time: a row of the table must then fail by its numbers."""

import contextlib

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule

from kftrain.parallel import buffers, gradients, initialize, replicas
from kftrain.parallel.batch_norm import GlobalBatchNorms
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.replicas import Replicas
from kftrain.parallel.shape import Shape
from kftrain.parallel.tensor import CopiedParameters


@contextlib.contextmanager
def patched(owner, name, value):
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def norm_of_one_part():
    """The norm is not summed over the axis that gradients are sharded along."""
    return patched(Mesh, "norm_group", lambda mesh: None)


def loss_counted_twice():
    """Each process along `tensor` counts the loss that they share."""
    return patched(Shape, "counts_loss", lambda shape, rank: True)


def copies_counted_by_all():
    """Each process along `tensor` counts the gradients of the parameters that they have copies of."""
    return patched(gradients, "collect_counted_gradients", gradients.collect_local_gradients)


def parts_of_gradients_not_summed():
    """Norms keep what their gradients owe to a process's own part of the sequences."""
    return patched(CopiedParameters, "__call__", lambda copies: None)


def gradient_averaged():
    """The mean over processes is taken for the sum."""
    averages = contextlib.ExitStack()
    averages.enter_context(patched(FSDPModule, "set_gradient_divide_factor", lambda unit, factor: None))
    averages.enter_context(patched(replicas, "_sum_bucket", averaged))
    return averages


def averaged(bucket, group, dtype, note, nodes):
    return allreduce_hook(group, bucket)


def gradients_not_exchanged():
    """Each replica keeps its own."""
    return patched(Replicas, "exchange", lambda replicas, does: replicas._model.set_requires_gradient_sync(False))


def filled_with_copies(model, places, *arguments, fill=initialize.fill_parts):
    fill(model, places, *arguments)
    for module, key in (slot for slots in places.values() for slot in slots):
        parameter = module._parameters[key]
        module._parameters[key] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def tied_weight_unties():
    """Where a parameter stands in two places there are two of them."""
    return patched(initialize, "fill_parts", filled_with_copies)


def filled_and_thawed(model, *arguments, fill=initialize.fill_parts):
    fill(model, *arguments)
    model.requires_grad_(True)


def frozen_weight_moves():
    """A parameter forgets that it is frozen."""
    return patched(initialize, "fill_parts", filled_and_thawed)


@contextlib.contextmanager
def statistics_by_rank():
    """Each process normalises with its own rows, and nobody looks whether buffers are the same when they are saved."""
    unconnected = patched(GlobalBatchNorms, "connect", lambda norms, *settings: None)
    with unconnected, patched(buffers, "require_equal", lambda model, world: None):
        yield
