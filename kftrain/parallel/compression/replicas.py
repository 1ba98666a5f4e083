"""`ddp` whose gradients travel compressed: the transform that registers the exchange of a configured kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from kftrain.parallel.compression.codecs import make_codec
from kftrain.parallel.compression.low_rank import LowRankSums
from kftrain.parallel.compression.momenta import LocalRule, SparseSums, Votes
from kftrain.parallel.compression.sums import PART, CompressedSums
from kftrain.parallel.distributed import Agreement, Distributed, Part
from kftrain.parallel.settings import ParallelConfig
from kftrain.parallel.sharded import Team

BUCKET_BYTES = 2 << 20
"""Bytes of fp32 that travel together: so few that one bucket is packed while another is on its way."""


@dataclass(frozen=True)
class CompressReplicas:
    """Keeps the whole model on each process, whose gradients are summed along the axis `replicate`, compressed."""

    parallel: ParallelConfig
    rule: LocalRule | None = None
    """For `topk` and `sign`."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Register the exchange, and the part of the checkpoint; see `Transform`."""
        group = distributed.mesh.group(["replicate"])
        sums = self._make_sums(group, lambda: distributed.learning_rate)
        distributed.team = Team((group,))
        distributed.when_filled.append(lambda: sums.begin(distributed.model, distributed.names))
        distributed.after_backward.append(sums.exchange)
        distributed.agreements.append(Agreement(sums.take_used, sums.drop_unused))
        distributed.when_decided.append(sums.settle)
        if sums.has_feedback or self.rule:
            distributed.parts[PART] = Part(1, sums.save, sums.load)

    def _make_sums(self, group: dist.ProcessGroup, find_rate: Callable[[], float]) -> CompressedSums:
        compression, bucket_bytes = self.parallel.compression, self.parallel.bucket_bytes or BUCKET_BYTES
        if self.rule and compression.kind == "topk":
            return SparseSums(group, compression, bucket_bytes, self.rule, find_rate)
        if compression.kind == "powersgd":
            return LowRankSums(group, compression.rank, bucket_bytes)
        if self.rule:
            return Votes(group, bucket_bytes, self.rule)
        return CompressedSums(group, make_codec(compression.kind), compression.feedback, bucket_bytes)
