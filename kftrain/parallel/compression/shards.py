"""Compressed exchanges of what FSDP2 shards: gradients on their way to their owners, parameters on their way out.

As ZeRO++ (Wang et al. 2023, arXiv:2306.10209), which has no feedback: a process packs the chunk of each owner, which
adds up what it was sent. Sums stay with their owners, in fp32, so gradients travel once; and so do parameters, packed,
at each gathering. Masters are not rounded, so parameters need no feedback; all processes compute with what was packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from kftrain.errors import ConfigError
from kftrain.parallel.compression.codecs import Codec, all_gather, make_codec
from kftrain.parallel.compression.sums import PART
from kftrain.parallel.distributed import Distributed, Part
from kftrain.parallel.fully_shard import Allocates
from kftrain.parallel.settings import CompressionConfig
from kftrain.parallel.sharded import local, spread_like


@dataclass(frozen=True)
class CompressShards:
    """Lets the units of a sharded model exchange packed numbers; it comes after `FullyShard`."""

    config: CompressionConfig

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Give each unit its exchanges, and register the part of the checkpoint; see `Transform`."""
        codec = make_codec(self.config.kind)
        sums: dict[FSDPModule, PackedSums] = {}
        for unit in distributed.model.modules():
            if isinstance(unit, FSDPModule):
                sums[unit] = PackedSums(codec)
                unit.set_custom_reduce_scatter(sums[unit])  # type: ignore[arg-type]
                unit.set_custom_all_gather(PackedGather(codec))  # type: ignore[arg-type]
        if not self.config.feedback:
            return
        if not hasattr(distributed.model, "set_reduce_scatter_unused_params"):
            what, fix = "before torch 2.13 a unit does not always exchange the same parameters", "set it to false"
            raise ConfigError(what, where="parallel.compression.feedback", value=True, fix=f"{fix}, or update torch")
        feedback = ShardedFeedback(distributed, sums)
        distributed.when_filled.append(feedback.begin)
        distributed.when_decided.append(feedback.settle)
        distributed.when_dropped.append(feedback.take_back)
        distributed.parts[PART] = Part(1, feedback.save, feedback.load)


class PackedGather(Allocates):
    """torch's protocol `AllGather`: parameters travel packed."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather the chunks of all processes, `[n]` -> `[W * n]`, each as it was packed. Collective."""
        assert not async_op
        packed = self._codec.pack(input_tensor.unsqueeze(0))
        gathered = packed.new_empty(group.size(), packed.shape[1])
        all_gather(gathered, packed, group=group)
        # This process's chunk, too, or it would compute with other parameters than the others.
        rows = output_tensor.view(group.size(), -1)
        rows.copy_(self._codec.unpack(gathered, rows.shape[1]))


class PackedSums(Allocates):
    """torch's protocol `ReduceScatter`: gradients of a unit travel packed, and what they lose is kept for the next."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.feedback: Any = None
        """Loss of this process's gradients on their way so far, `[W * n]`; None where it is not kept."""
        self.next_feedback: torch.Tensor | None = None
        """Its value after this step, unless that is skipped; None between steps."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum this process's chunk over all: `[W * n]` -> `[n]`, written to `output_tensor`. Collective."""
        assert not async_op and op == dist.ReduceOp.SUM, (async_op, op)
        size, rank = group.size(), group.rank()
        # A step may have several exchanges.
        before = self.feedback if self.next_feedback is None else self.next_feedback
        total = input_tensor.float() if before is None else input_tensor + before
        rows = total.view(size, -1)
        packed = self._codec.pack(rows)
        received = torch.empty_like(packed)
        dist.all_to_all_single(received, packed, group=group)
        output_tensor.copy_(rows[rank])  # its own share does not travel, and is not rounded
        for other, part in enumerate(self._codec.unpack(received, rows.shape[1]).unbind()):
            if other != rank:
                output_tensor.add_(part)
        if self.feedback is not None:
            lost = rows - self._codec.unpack(packed, rows.shape[1])
            lost[rank] = 0.0
            self.next_feedback = lost.view(-1)


class ShardedFeedback:
    """The feedback of all units on this process: what their gradients have lost."""

    def __init__(self, distributed: Distributed, sums: dict[FSDPModule, PackedSums]) -> None:
        self._distributed = distributed
        self._group = distributed.mesh.group(["shard"])
        self._sums = sums

    def begin(self) -> None:
        """Begin with nothing lost; the parameters have their values."""
        for unit, sums in self._sums.items():
            length = sum(member.padded_sharded_param_size.numel() for member in _list_members(unit))
            sums.feedback = torch.zeros(length * self._group.size(), device=self._distributed.mesh.world.device)

    def settle(self, found_inf: torch.Tensor) -> None:
        """Keep what this step has lost, unless it is skipped: then `found_inf` is 1."""
        for sums in self._sums.values():
            if sums.next_feedback is not None:
                torch.where(found_inf > 0, sums.feedback, sums.next_feedback, out=sums.feedback)
                sums.next_feedback = None

    def take_back(self, parameter: nn.Parameter) -> None:
        """Keep what would be applied to a parameter that no process has used, and whose gradient is dropped."""
        for unit, sums in self._sums.items():
            for member, part in self._list_parts(unit, sums.next_feedback):
                if member is parameter and parameter.grad is not None:
                    part.add_(local(parameter.grad))

    def save(self) -> dict[str, Any]:
        """Return what is kept, summed over processes, cut as the parameters are. Collective."""
        names = self._name_parameters()
        state: dict[str, Any] = {}
        for unit, sums in self._sums.items():
            total = sums.feedback.clone()
            dist.all_reduce(total, group=self._group)
            for parameter, part in self._list_parts(unit, total):
                state[names[parameter]] = spread_like(parameter, part)
        return {"lost": state}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Keep of the sums of a checkpoint those that this process owns, so that each is kept by one process."""
        names = self._name_parameters()
        for unit, sums in self._sums.items():
            for parameter, part in self._list_parts(unit, sums.feedback.zero_()):
                part.copy_(local(state["lost"][names[parameter]]))

    def _name_parameters(self) -> dict[nn.Parameter, str]:
        trained = [parameter for parameter in self._distributed.model.parameters() if parameter.requires_grad]
        return dict(zip(trained, self._distributed.names, strict=True))

    def _list_parts(self, unit: FSDPModule, vector: torch.Tensor | None) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """List the parameters of a unit, each with its part of this process's chunk of a vector, if there is one."""
        if vector is None:
            return
        start = len(vector) // self._group.size() * self._group.rank()
        for member in _list_members(unit):
            size = member.sharded_size
            yield _take_parameter(member), vector[start : start + size.numel()].view(size)
            start += member.padded_sharded_param_size.numel()  # parts are of one length, those of the last filled up


def _list_members(unit: FSDPModule) -> list[Any]:
    """List the trained parameters of a unit as FSDP2 knows them, in the order in which they lie in an exchange."""
    groups = unit._get_fsdp_state()._fsdp_param_groups
    return [member for group in groups for member in group.fsdp_params if _take_parameter(member).requires_grad]


def _take_parameter(member: Any) -> nn.Parameter:
    return getattr(member._module_info.module, member._module_info.param_name)  # type: ignore[no-any-return]
