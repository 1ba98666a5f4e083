"""Compiles the forward of each block by `torch.compile`: blocks that are alike share what was compiled.

What recomputes a block is compiled with it. The hooks around it, which shard, cast, seed and count calls, are not.
Another size of the batch makes torch compile once more, for all sizes. Fused operations round less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kftrain.errors import ConfigError
from kftrain.parallel.distributed import Distributed

OPTIONS: dict[str, Any] = {"fallback_random": True}  # it draws the random numbers that eager torch draws

GRAPHS: dict[str, Any] = {"triton.cudagraphs": True}
"""Options of torch's mode `reduce-overhead`, which takes no other options beside it."""


def require_compiler(device: torch.device) -> None:
    """Compile a line for the device. Raises ConfigError where torch finds no compiler that can."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds

    try:
        torch.compile(lambda tensor: tensor.sin() + 1, options=OPTIONS)(torch.ones(2, device=device))
    except TorchDynamoException as error:
        needs = "Triton, which torch's wheels for CUDA bring, and gcc" if device.type == "cuda" else "g++"
        what = f"torch cannot compile here: {str(error).strip().partition(chr(10))[0]}"
        fix = f"put {needs} into the image of the workers, or set it to false"
        raise ConfigError(what, where="train.compile", value=True, fix=fix) from error


@dataclass(frozen=True)
class CompileBlocks:
    """Compiles each block; after what recomputes it, and before what spreads it."""

    has_graphs: bool = False
    """True where torch records what a block asks of a GPU, and repeats it as a whole: one call of the host."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Put a compiled forward in the place of each block's. Raises ConfigError for a model without blocks."""
        if not blocks:
            fix = "name them in a method blocks() of the model, or set it to false"
            raise ConfigError("the model has no blocks to compile", where="train.compile", value=True, fix=fix)
        options = OPTIONS | GRAPHS if self.has_graphs else OPTIONS
        if self.has_graphs:
            # What a block returns lies where its next repetition writes, so that may come with the model's next forward
            # only. Left alone, torch takes the call of each block for a beginning where no gradients are needed.
            distributed.model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())  # type: ignore[no-untyped-call]
        for name in blocks:
            block: Any = distributed.model.get_submodule(name)
            # Not the module's own `compile`, which compiles the frames of hooks as well, and no block of torch's own.
            block.forward = torch.compile(block.forward, options=options)
            for part in block.modules():  # reads on the host where documents are: each batch would be compiled anew
                if hasattr(part, "attend_chunks"):
                    part.attend_chunks = torch.compiler.disable(part.attend_chunks)  # type: ignore[no-untyped-call]
