"""What memory is saved, and at what cost of time: losses by chunks, and selective recomputation, in turns with plain.

    python benchmarks/train/memory.py chunked [--rounds 3] [--tokens 2048] [--classes 131072] [--dim 256] [--chunk 256]
    python benchmarks/train/memory.py selective [--rounds 5] [--dim 512] [--layers 4] [--tokens 1024]

`chunked`: cross-entropy of a large vocabulary forward and backward; peaks of the process's anonymous memory, over what
it had, less the gradient of the output layer, which either has. `selective`: forward and backward passes of blocks of
the built-in transformer; bytes that live between the two. Times are of the process's CPU clock, the least of the
rounds. Last line: name -> figure, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import nn

from kftrain.models.transformer import Transformer
from kftrain.parallel.activations import CheckpointActivations
from kftrain.parallel.chunked_logits import ChunkedLogits

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from helpers.activations import Allocations
from helpers.memory import peak_of_memory

IGNORED = -100


def measure_chunked(arguments: argparse.Namespace) -> dict[str, float]:
    """Peak and time of a loss by chunks over those of whole logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.dim, generator=generator).requires_grad_()
    weight = torch.randn(arguments.classes, arguments.dim, generator=generator).mul_(arguments.dim**-0.5)
    weight.requires_grad_()
    targets = torch.randint(0, arguments.classes, (arguments.tokens,), generator=generator)
    losses: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum"),
        "chunked": lambda: ChunkedLogits(hidden, weight, None, arguments.chunk).sum_cross_entropy(targets, IGNORED),
        "terms": lambda: ChunkedLogits(hidden, weight, None, arguments.chunk).cross_entropy(targets).sum(),
    }
    peaks, seconds = dict[str, float](), {name: [float("inf")] for name in losses}
    for _ in range(arguments.rounds):
        for name, compute in losses.items():
            hidden.grad = weight.grad = None
            with peak_of_memory() as found:
                start = time.process_time()
                (compute() / arguments.tokens).backward()
                seconds[name].append(time.process_time() - start)
            peaks[name] = max(peaks.get(name, 0.0), found["bytes"] - weight.nbytes)
    ratios = {
        f"{name} {what}": float(of[name]) / float(of["plain"])
        for what, of in (("peak", peaks), ("time", {name: min(each) for name, each in seconds.items()}))
        for name in losses
    }
    return {**ratios, "plain_mib": peaks["plain"] / 2**20, "plain_seconds": min(seconds["plain"])}


class Parts:
    """As much of a distributed model as wrapping its blocks asks for."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.roots = nn.ModuleList([model])


def measure_selective(arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes that are kept, and time, of each way over keeping all."""
    tokens = torch.zeros(2, arguments.tokens // 2, dtype=torch.int64)
    models, kept = dict[str, Any](), dict[str, float]()
    names = [f"model.layers.{number}" for number in range(arguments.layers)]
    for method in ("none", "selective", "blocks"):
        torch.manual_seed(0)
        sizes = {"dim": arguments.dim, "num_layers": arguments.layers, "num_heads": arguments.dim // 64}
        models[method] = Transformer(vocab_size=16, sequence_length=tokens.shape[1], **sizes)
        if method != "none":
            wrapping: Any = CheckpointActivations(method, names)  # type: ignore[arg-type]
            wrapping.apply(Parts(models[method]), names)
        with Allocations() as allocations:
            logits = models[method](tokens)
            kept[method] = allocations.live - logits.nbytes
            logits.square().mean().backward()
    seconds = dict.fromkeys(models, float("inf"))
    for _ in range(arguments.rounds):
        for method, model in models.items():
            start = time.process_time()
            model(tokens).square().mean().backward()
            seconds[method] = min(seconds[method], time.process_time() - start)
    figures = {f"{method} kept": kept[method] / kept["none"] for method in models}
    return (
        figures
        | {f"{method} time": seconds[method] / seconds["none"] for method in models}
        | {"none_seconds": seconds["none"]}
    )


def main() -> None:
    """Print the figures of one kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["chunked", "selective"])
    for name, default in (
        ("rounds", 5),
        ("tokens", 0),
        ("classes", 131_072),
        ("dim", 0),
        ("chunk", 256),
        ("layers", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    is_chunked = arguments.kind == "chunked"
    arguments.tokens, arguments.dim = (
        arguments.tokens or (2048 if is_chunked else 1024),
        arguments.dim or (256 if is_chunked else 512),
    )
    print(json.dumps(measure_chunked(arguments) if is_chunked else measure_selective(arguments)))


if __name__ == "__main__":
    main()
