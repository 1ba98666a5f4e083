"""The strategies as data: what each keeps whole, when it exchanges what is sharded, and which one `auto` takes.

The stages are those of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054). All come from one tool, FSDP2, which shards
parameters, gradients and the optimizer's state alike between two steps; what they differ in is for how long a step has
the whole of them:

    zero1   parameters are gathered once a step; gradients are summed whole over the micro batches, exchanged at the end
    zero2   parameters are gathered once a step; gradients are exchanged, and so sharded, after each micro batch
    fsdp    parameters of a block are gathered for its forward pass, and again for its backward pass (ZeRO-3)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["auto", "ddp", "zero1", "zero2", "fsdp"]

Exchange = Literal["step", "micro_batch"]

STATE_SHARE = 0.5
"""Share of a device's memory for parameters, gradients and optimizer state; the rest is for activations."""

STATE_COPIES = 4
"""Number of sharded copies of the parameters in fp32: masters, gradients, and AdamW's two moments."""


@dataclass(frozen=True)
class Sharding:
    """The time for which a step has the whole of what is sharded."""

    reshard_after_forward: bool
    """True to free a block's parameters after its forward pass, and gather them again for its backward pass."""
    keep_gathered: bool
    """True to keep parameters whole from the first micro batch of a step to the last."""
    exchange: Exchange
    """Moment at which gradients are exchanged; until then each process has the whole sum of its own."""


def resolve_sharding(strategy: Strategy, exchange: Exchange) -> Sharding:
    """Return what a strategy that shards keeps whole. `exchange`: for `fsdp`; the others say it themselves."""
    if strategy == "fsdp":  # parts are gathered block by block, and freed, so that no process ever has the whole model
        return Sharding(True, False, exchange)
    return Sharding(False, True, "micro_batch" if strategy == "zero2" else "step")


@dataclass(frozen=True)
class Choice:
    """The strategy that `auto` takes, and the reason in words for the log."""

    strategy: Literal["zero1", "zero2", "fsdp"]
    reason: str


def choose_strategy(
    parameter_bytes: int, memory_bytes: int, num_processes: int, accumulates: bool, half: bool
) -> Choice:
    """Choose the first of zero1, zero2 and fsdp whose state takes at most half of a device's memory; fsdp if none does.

    Zero1 moves as many bytes as `ddp` does and keeps less, so `ddp` is never chosen.

    Args:
        parameter_bytes: Bytes of a process's parameters in fp32, after splits along other axes.
        memory_bytes: Memory of the smallest device.
        num_processes: Number of processes that share one copy of the state.
        accumulates: True where a step has several micro batches; with one, zero1 never has all gradients at a time.
        half: True for a computation in bf16, so that what is gathered is half as large.
    """
    of = parameter_bytes, num_processes, accumulates, half
    needs = {"zero1": estimate_state_bytes("zero1", *of), "zero2": estimate_state_bytes("zero2", *of)}
    limit = int(STATE_SHARE * memory_bytes)
    about = f"of {_gib(memory_bytes)} of memory, {_gib(limit)} may be state"
    if needs["zero1"] <= limit:
        return Choice("zero1", f"it needs {_gib(needs['zero1'])}; {about}")
    if needs["zero2"] <= limit:
        return Choice("zero2", f"zero1 would need {_gib(needs['zero1'])}, it {_gib(needs['zero2'])}; {about}")
    return Choice("fsdp", f"zero2 would need {_gib(needs['zero2'])}; {about}")


def estimate_state_bytes(
    strategy: Strategy, parameter_bytes: int, num_processes: int, accumulates: bool, half: bool
) -> int:
    """Estimate the bytes of a process's parameters, gradients and optimizer state; see `choose_strategy`.

    Of `fsdp` and `auto`, which may be it, the most: whole gradients of several micro batches, as zero1 has them.
    """
    if strategy == "ddp":
        return STATE_COPIES * parameter_bytes + (parameter_bytes // 2 if half else 0)
    sharded = STATE_COPIES * parameter_bytes // num_processes
    gathered = parameter_bytes // (2 if half else 1)
    # Zero1 and zero2 keep all parameters gathered for the length of a step. Over several micro batches zero1 adds up
    # whole gradients, in fp32; zero2 sums and shards them after each.
    return sharded + gathered + (parameter_bytes if accumulates and strategy != "zero2" else 0)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
