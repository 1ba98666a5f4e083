"""Finds the micro batch for `train.micro_batch_size: auto`: the largest whose activations fit into free memory.

Each process computes the loss of one row and of two, with its gradients, in a model of its own without weights (all
are one zero), and counts the bytes that operations take meanwhile. Two sizes make a line, whose slope is the bytes of
a row; what the layout keeps of the model is known without trying. So no size is tried that does not fit, which on a
CPU would end the process; and no process waits for another, but once, to learn the smallest answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.data.loader import MicroBatch, measure_own_bytes
from kftrain.data.order import BatchPlan
from kftrain.errors import ConfigError, UserCodeError
from kftrain.models.registry import build_model
from kftrain.parallel import blocks, initialize
from kftrain.parallel.chunked_logits import ChunkLogits
from kftrain.parallel.distributed import Distributed, Transform
from kftrain.parallel.formats import DTYPES, cast_inputs
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.strategies import estimate_state_bytes
from kftrain.parallel.transforms import ToDevice
from kftrain.run import documents
from kftrain.run.documents import MicroBatchChoice
from kftrain.tasks.base import Task
from kftrain.train import probe
from kftrain.train.completing import ask_model_arguments
from kftrain.train.optimizer import freeze
from kftrain.train.reading import Training, open_loader
from kftrain.train.spmd_factory import gather_results, list_block_transforms
from kftrain.train.step import compute_loss_sum, count_loss_terms, receive_tensors

WHERE = "train.micro_batch_size"

USED_SHARE = 0.8
"""Share of the free memory that a micro batch may take with the state: allocators leave holes, and libraries take
memory of their own."""


def resolve_micro_batch(training: Training, mesh: Mesh) -> Training:
    """Return the training with a number in place of `auto`: the one of the run's last attempt in this layout, if any.

    Collective. Raises ConfigError where not one row fits.
    """
    config = training.config
    if config.train.micro_batch_size != "auto":
        return training
    uri, layout = training.paths.micro_batch, storage.digest_json(_describe_layout(config, mesh))
    known = documents.read_if_exists(MicroBatchChoice, uri) if mesh.world.is_main else None
    rows = mesh.world.from_main(known.rows if known and known.layout == layout else 0)
    if not rows:
        rows = min(gather_results(mesh.world, lambda: find_rows(training, mesh)))
        if mesh.world.is_main:
            storage.publish_json(uri, MicroBatchChoice(rows=rows, layout=layout).to_dict())
            to_log(f"{WHERE}: auto takes {rows}")
    train = config.train.model_copy(update={"micro_batch_size": rows})
    return dataclasses.replace(training, config=config.model_copy(update={"train": train}))


def _describe_layout(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Describe what the answer depends on, beside the model."""
    keys = {"activation_checkpointing", "checkpointed_blocks", "loss_chunk_tokens", "average_decay"}
    kept = config.train.model_dump(mode="json", include=keys)
    sections = {"parallel": config.parallel.model_dump(mode="json"), "precision": config.precision.compute}
    return {**kept, **sections, "processes": mesh.world.size, "device": mesh.world.device.type}


def find_rows(training: Training, mesh: Mesh) -> int:
    """Return the rows of a micro batch that fits here. Not collective. Raises ConfigError where not one does."""
    device, share = mesh.world.device, BatchPlan(training.config.train.global_batch_size, mesh.num_data_ranks)
    num_tried = min(2, share.micro_batch_rows)
    model = _build_model(training, mesh)
    micro = _read_rows(training, mesh, num_tried)
    tried = [probe.take_rows(micro, slice(count)) for count in (1, num_tried)]
    peaks = [_measure_peak(model, training.task, rows, device) for rows in tried]
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else measure_own_bytes()
    state_bytes = _count_state_bytes(training.config, model, mesh)
    if math.inf in peaks:
        return choose_rows(1, peaks[0], state_bytes, free)
    row_bytes = max(peaks[1] - peaks[0], 1)
    return choose_rows(share.micro_batch_rows, row_bytes, peaks[0] - row_bytes + state_bytes, free)


def _read_rows(training: Training, mesh: Mesh, count: int) -> MicroBatch:
    """Read a micro batch of the first rows of this process, as it would be in a batch of the final size."""
    train = training.config.train.model_copy(update={"micro_batch_size": count, "batch_warmup": ()})
    trying = dataclasses.replace(training, config=training.config.model_copy(update={"train": train}))
    count_terms = functools.partial(count_loss_terms, training.task)
    with (
        contextlib.closing(open_loader(trying, mesh.num_data_ranks, mesh.data_rank, count_terms)) as loader,
        contextlib.closing(loader.steps(0, 1)) as steps,
    ):
        return next(steps).micro_batches[0]


def _build_model(training: Training, mesh: Mesh) -> nn.Module:
    """Build the model in the format of the computation; its parameters are views of one zero, and keep no gradients."""
    config, device, dtype = training.config, mesh.world.device, DTYPES[training.config.precision.compute]
    arguments = ask_model_arguments(training.task)
    model = initialize.construct_empty(lambda: build_model(config.model, arguments))
    for parameter in model.parameters():
        initialize.give_memory(parameter, torch.zeros((), dtype=dtype, device=device).expand(parameter.shape))
    freeze(model, config.optimizer.groups)
    for parameter in model.parameters():
        if parameter.requires_grad:  # as sharding does it, a unit's at a time
            parameter.register_post_accumulate_grad_hook(lambda used: setattr(used, "grad", None))  # type: ignore[no-untyped-call]
    names = blocks.find_candidates(model).declared_names
    cast_inputs(model, names, dtype)
    chunks = [ChunkLogits(config.train.loss_chunk_tokens)] if config.train.loss_chunk_tokens else []
    transforms: list[Transform] = [ToDevice(), *chunks, *list_block_transforms(config.train, names)]
    for transform in transforms:
        transform.apply(Distributed(model, mesh), names)
    return model


def _measure_peak(model: nn.Module, task: Task, micro: MicroBatch, device: torch.device) -> float:
    """Measure the bytes that the loss of some rows and its gradients take at the most, parameters not counted.

    Infinite where there is not so much memory.
    """
    tensors = receive_tensors(task, micro, device)
    try:
        with probe.isolate((0, 0), device), CountedBytes() as counted:
            compute_loss_sum(model, task, tensors).backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, MemoryError, UserCodeError) as error:
        cause = error.__cause__ or error
        # On a CPU torch raises a RuntimeError like any other.
        if not isinstance(cause, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(cause):
            raise
        return math.inf
    return float(counted.peak_bytes)


class CountedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of the tensors that operations within the block make, as long as these live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._bytes: dict[int, int] = {}
        """Address of a storage -> its bytes."""

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        made = operation(*arguments, **(keywords or {}))
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((arguments, keywords)) if _has_memory(leaf)}
        for memory in [leaf.untyped_storage() for leaf in tree_leaves(made) if _has_memory(leaf)]:
            key = memory._cdata
            if key not in inputs and key not in self._bytes:
                self._bytes[key] = memory.nbytes()
                weakref.finalize(memory, self._bytes.pop, key, None)
        self.peak_bytes = max(self.peak_bytes, sum(self._bytes.values()))
        return made


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_meta


def _count_state_bytes(config: Config, model: nn.Module, mesh: Mesh) -> int:
    """Count the bytes of parameters, gradients, optimizer state, averages and compression of a process."""
    parameter_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    num_shards, half = mesh.shape.num_shards, config.precision.compute != "fp32"
    average_bytes = parameter_bytes // num_shards if config.train.average_decay else 0
    trained_bytes = 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    kept_bytes = trained_bytes * config.parallel.compression.count_vectors(num_shards > 1)
    strategy = "ddp" if num_shards == 1 else config.parallel.stage
    state_bytes = estimate_state_bytes(strategy, parameter_bytes, num_shards, accumulates=True, half=half)
    return state_bytes + average_bytes + kept_bytes


def choose_rows(share: int, row_bytes: float, fixed_bytes: float, free_bytes: float) -> int:
    """Return the rows of the largest micro batch that fits, as a process's `share` of rows is cut into equal ones.

    It takes `row_bytes` for each row, and `fixed_bytes` besides, of `USED_SHARE` of the `free_bytes`.

    Raises ConfigError where not one row fits.
    """
    fitting = min(share, int((USED_SHARE * free_bytes - fixed_bytes) // row_bytes))
    if fitting < 1:
        need, have = (f"{count / 2**30:.3g} GiB" for count in (fixed_bytes + row_bytes, USED_SHARE * free_bytes))
        what = f"one row needs {need}, of which {have} may be taken"
        what = "one row needs more memory than there is" if math.isinf(row_bytes) else what
        fix = "use train.activation_checkpointing, train.loss_chunk_tokens or more processes"
        raise ConfigError(what, where=WHERE, value="auto", fix=fix)
    return -(-share // -(-share // fitting))
