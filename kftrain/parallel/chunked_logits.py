"""Logits that are never whole: computed for some tokens at a time, from what the output layer was given.

With a large vocabulary they and their gradient are most of the memory of a step. Here the output layer returns its
input with its matrix, and whoever asks for losses computes the logits of `loss_chunk_tokens` tokens at a time. A sum
over fp32 is torch's own (`F.linear_cross_entropy`), which makes the gradients on the way forward, while the logits are
there. Everything else (bf16, of which torch would round the sum, terms that a task weights, a vocabulary in parts)
computes each chunk's logits once more in the backward pass.

Sharding frees the output layer's matrix when the model's forward ends. So what is computed from logits is computed
before that, within the forward: `compute_within`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import nn

from kftrain.errors import ConfigError, UserCodeError
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.tensor_exchange import Peers
from kftrain.parallel.vocabulary import SplitLogits

WHERE = "train.loss_chunk_tokens"


class ChunkedLogits(NamedTuple):
    """Logits `[..., classes]` before they are computed. All that is asked of those in parts is collective.

    A tuple, so that whatever looks for tensors in an output finds them.
    """

    hidden: torch.Tensor
    """`[..., dim]`, the input of the output layer."""
    weight: torch.Tensor
    """`[classes, dim]`, or this process's part of it."""
    bias: torch.Tensor | None
    num_tokens: int
    """Number of tokens whose logits are there at a time."""
    peers: Peers | None = None
    """The processes that have the other classes, if any."""
    num_classes: int = 0
    """Number of classes of all of them."""

    def sum_cross_entropy(self, targets: torch.Tensor, ignored: int) -> torch.Tensor:
        """Return the sum of the losses in nats, fp32, of those `targets` `[...]` that are not `ignored`."""
        if self.peers is not None or self.hidden.dtype != torch.float32:
            return self.cross_entropy(targets).masked_fill(targets == ignored, 0.0).sum()
        targets = targets.long()  # of other integers torch would take all logits at once
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=self.num_tokens, chunking_method=None)
        hidden, wanted = self.hidden.flatten(0, -2), targets.flatten()
        return F.linear_cross_entropy(
            hidden, self.weight, wanted, linear_bias=self.bias, reduction="sum", ignore_index=ignored, options=options
        )

    def cross_entropy(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each of `targets` `[...]`, in nats and fp32."""
        losses: torch.Tensor = _LossesByChunks.apply(  # type: ignore[no-untyped-call]
            self.hidden.flatten(0, -2), self.weight, self.bias, targets.flatten(), self
        )
        return losses.view(targets.shape)

    def score(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each of `targets` `[...]`, and the class of the largest logit, `[...]` int64."""
        tokens, wanted = self.hidden.flatten(0, -2), targets.flatten()
        chunks = zip(torch.split(tokens, self.num_tokens), torch.split(wanted, self.num_tokens), strict=True)
        scores = [self._score_logits(F.linear(hidden, self.weight, self.bias), wanted) for hidden, wanted in chunks]
        losses, guesses = zip(*scores, strict=True)
        return torch.cat(losses).view(targets.shape), torch.cat(guesses).view(targets.shape)

    def compute_losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each target of one chunk. `logits`: of the classes that are here."""
        if self.peers is None:
            return F.cross_entropy(logits.float(), targets, reduction="none")
        return SplitLogits(logits, self.peers, self.num_classes).cross_entropy(targets)

    def _score_logits(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.peers is None:
            return self.compute_losses(logits, targets), logits.argmax(-1)
        return SplitLogits(logits, self.peers, self.num_classes).score(targets)


class _LossesByChunks(torch.autograd.Function):
    """Losses of tokens, of which the backward pass computes the logits again, chunk by chunk.

    A function of its own, because autograd would add the chunks' gradients of the matrix in its own format: in bf16 a
    sum over many chunks loses the small ones.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: Any, bias: Any, targets: torch.Tensor, of: Any) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.compute_losses, ctx.num_tokens = of.compute_losses, of.num_tokens
        chunks = zip(torch.split(hidden, of.num_tokens), torch.split(targets, of.num_tokens), strict=True)
        return torch.cat([of.compute_losses(F.linear(part, weight, bias), wanted) for part, wanted in chunks])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        layer = [tensor.detach().requires_grad_() for tensor in (weight, bias) if tensor is not None]
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in layer]
        of_hidden = torch.empty_like(hidden)
        for number, wanted in enumerate(torch.split(targets, ctx.num_tokens)):
            places = slice(number * ctx.num_tokens, number * ctx.num_tokens + len(wanted))
            part = hidden[places].detach().requires_grad_()
            with torch.enable_grad():
                losses = ctx.compute_losses(F.linear(part, *layer), wanted)
            of_hidden[places], *of_layer = torch.autograd.grad(losses, (part, *layer), gradient[places])
            for total, more in zip(sums, of_layer, strict=True):
                total += more
        of_weight, of_bias = (*(total.to(weight.dtype) for total in sums), None)[:2]
        return of_hidden, of_weight, of_bias, None, None


def end_forward(model: Any) -> None:
    """Let the model's forward end with what `compute_within` is asked for, while its weights are still whole.

    Who calls the model by itself is given whole logits.
    """
    forward, model.finish = model.forward, None

    def forward_to_the_end(*arguments: Any, **keywords: Any) -> Any:
        returned = forward(*arguments, **keywords)
        if model.finish is None:
            return returned
        if isinstance(getattr(returned, "output", returned), torch.Tensor):
            what, fix = "forward makes logits without calling its output_layer()", f"call it, or set {WHERE} to 0"
            raise UserCodeError(what, where="model.forward", fix=fix)
        return model.finish(returned)

    model.forward = forward_to_the_end


def compute_within(model: Callable[..., Any], arguments: tuple[Any, ...], finish: Callable[[Any], Any]) -> Any:
    """Return `finish` of what a model returns; computed within its forward where `end_forward` has changed that."""
    # Not by `getattr`: a module that lacks the attribute looks for it in three places, and a small model's step waits.
    attributes = vars(model)
    if "finish" not in attributes:
        return finish(model(*arguments))
    attributes["finish"] = finish
    try:
        return model(*arguments)
    finally:
        attributes["finish"] = None


@dataclass(frozen=True)
class ChunkLogits:
    """Lets the model's output layer return `ChunkedLogits`. It comes after what splits that layer."""

    num_tokens: int
    is_split: bool = False
    """True where `SplitTensors` has the output layer, which then returns them already."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Change the output layer, and let the model's forward end with what is computed from it.

        Raises ConfigError where the model does not say which layer it is, or it is within a block.
        """
        model: Any = distributed.model
        layer = find_output_layer(model, blocks)
        # Not stages: they end their forward with the loss in any case.
        ends_forward = distributed.roots[0] is model
        if not self.is_split:
            layer.forward = self._build_forward(layer, model if ends_forward else None)
        if ends_forward:
            end_forward(model)

    def _build_forward(self, layer: Any, ended: Any) -> Callable[[torch.Tensor], Any]:
        """Build the layer's forward. `ended`: the model, where somebody may call it for whole logits."""
        inner, checked = layer.forward, list[bool]()

        def compute(values: torch.Tensor) -> Any:
            if not values.is_floating_point() or (ended is not None and ended.finish is None):
                return inner(values)  # a tied embedding, which looks tokens up; or whole logits
            bias = getattr(layer, "bias", None)
            if not checked:  # once: a layer that does more than a linear one would silently do less here
                require_linear(inner, values.detach(), layer.weight, bias)
                checked.append(True)
            return ChunkedLogits(values, layer.weight, bias, self.num_tokens)

        return compute


def find_output_layer(model: Any, blocks: Sequence[str]) -> nn.Module:
    """Return the layer whose output the model returns. Raises ConfigError where it is not known, or within a block."""
    method = getattr(model, "output_layer", None)
    if not callable(method):
        what, fix = f"{type(model).__name__} does not say which layer makes its logits", "or set this to 0"
        raise ConfigError(what, where=WHERE, fix=f"give the model a method output_layer(), {fix}")
    if model._forward_hooks:
        what = f"a forward hook of {type(model).__name__} would be given the loss in the place of its output"
        raise ConfigError(what, where=WHERE, fix="do in forward what the hook does, or set this to 0")
    layer: nn.Module = method()
    inside = next((name for name in blocks if layer in set(model.get_submodule(name).modules())), None)
    if inside is not None:
        what = "the output layer is within a block, whose matrices are freed before the loss is computed"
        raise ConfigError(what, where=WHERE, value=inside, fix="leave it out of the model's blocks()")
    return layer


@torch.no_grad()
def require_linear(
    inner: Callable[[torch.Tensor], Any], hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raises UserCodeError where the output layer computes something else of a token than `F.linear`."""
    token = hidden.flatten(0, -2)[:1]
    if not torch.allclose(inner(token), F.linear(token, weight, bias), rtol=1e-2, atol=1e-4, equal_nan=True):
        what = "the output layer is no linear one, so that its logits cannot be computed by chunks"
        raise UserCodeError(what, where="model.output_layer", fix=f"scale in the layers before it, or set {WHERE} to 0")
