"""What one process computes of a step: its loss terms, their sum, and the random numbers that it draws."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from kftrain.core.plugins import user_code
from kftrain.data.loader import MicroBatch
from kftrain.errors import UserCodeError
from kftrain.models.output import split_output
from kftrain.tasks.base import Task
from kftrain.tasks.prepare import arguments_of
from kftrain.train.carrier import Tensors, built, to_device


def terms_of(task: Task, micro: MicroBatch) -> np.ndarray:
    """Count the loss terms of each row, `[rows]`; 0 for padding. Raises UserCodeError for another shape."""
    with user_code("task.count_terms"):
        counts = np.asarray(task.count_terms(micro.arrays))
    if counts.shape != micro.weight.shape:
        raise UserCodeError(
            f"must return one number for each of {len(micro.weight)} rows, got {list(counts.shape)}",
            where="task.count_terms",
        )
    weighted: np.ndarray = counts * micro.weight
    return weighted


def receive_tensors(task: Task, micro: MicroBatch, device: torch.device) -> Tensors:
    """Return the tensors that were sent to the device; build and copy them now if none were."""
    if micro.sent is None:
        return to_device(built(task, micro, terms_of(task, micro)), device)
    sent: Tensors = micro.sent.receive()
    return sent


def loss_of(model: nn.Module, task: Task, tensors: Tensors) -> torch.Tensor:
    """Compute the sum of the loss terms, fp32, auxiliary ones among them.

    Raises UserCodeError for what is no scalar with a gradient.
    """
    inputs = arguments_of(task, tensors.batch)
    with user_code("model.forward"):
        answer = split_output(model(*inputs), len(tensors.weight))
    with user_code("task.loss"):
        loss = task.loss(answer.output, tensors.batch, tensors.weight)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        shown = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UserCodeError(f"must return a scalar, got {shown}", where="task.loss", fix="return the sum of all terms")
    if not loss.requires_grad:
        raise UserCodeError("depends on no parameter that is trained", where="task.loss")
    if answer.auxiliary is None:
        return loss.float()
    # Per row, times the row's terms: the step divides by the count of all terms, so it comes to a mean over terms, and
    # padding, which has none, adds nothing.
    return loss.float() + (answer.auxiliary.float() * tensors.terms).sum()


def has_hook(model: nn.Module) -> bool:
    """Tell whether the model has an `after_step` of its own."""
    return callable(getattr(model, "after_step", None))


def after_step(model: nn.Module) -> None:
    """Call the model's own `after_step`, where it has one. Raises UserCodeError where it replaces a parameter."""
    # The optimizer keeps the parameters that it was built with: it would go on with the old one.
    hook = getattr(model, "after_step", None)
    if callable(hook):
        before = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad(), user_code("model.after_step"), _DataIntoParts():
            hook()
        now = dict(model.named_parameters(remove_duplicate=False))
        name = next((name for name in before | now if before.get(name) is not now.get(name)), None)
        if name is not None:
            fix = "change its values: parameter.copy_(…)"
            raise UserCodeError("puts another parameter in place", where="model.after_step", value=name, fix=fix)


class _DataIntoParts(TorchFunctionMode):
    """Lets `parameter.data = …` copy into a distributed parameter: its memory is that of its part, and must stay."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function == _SET_DATA and isinstance(arguments[0], DTensor):
            return arguments[0].detach().copy_(arguments[1])
        return function(*arguments, **(keywords or {}))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def seed_step(seed: int, step: int, data_rank: int, device: torch.device) -> None:
    """Seed torch for one step of one process: dropout after a resume equals dropout without, and no state is saved.

    Only the generators that the process uses: `torch.manual_seed` takes as long as a small model's forward pass.
    """
    # By the data rank: processes that share samples (tensor) compute alike, and must draw alike.
    digest = hashlib.sha256(f"{seed}/{step}/{data_rank}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
