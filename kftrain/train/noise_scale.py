"""Measures the gradient noise scale: the size of a batch above which more samples make gradients hardly better.

McCandlish et al. 2018, arXiv:1812.06162, appendix A.1: a gradient of B samples has in the mean a squared norm of
|G|² + S / B. So the norms of a step's gradient and of its equal parts' give estimates of |G|² and S without a bias.
These are averaged over steps before they are divided: the ratio of single ones would have one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from kftrain.config import Config
from kftrain.data.order import BatchPlan
from kftrain.errors import ConfigError
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.gradients import collect_local_gradients, compute_total_norm
from kftrain.parallel.mesh import Mesh

DECAY = 0.99  # of the averages in a step


class NoiseScale:
    """The averages of |G|² and S; a transform that comes first, so that it sees gradients before a model's hooks do."""

    def __init__(self, config: Config, plan: BatchPlan, mesh: Mesh) -> None:
        """Raises ConfigError where a step's gradient is no sum of equal parts, or these are never there."""
        self._num_processes = mesh.world.size
        self._batch_size = plan.global_batch_size
        replicas = mesh.shape.replicate if config.parallel.stage == "ddp" else 1
        self._num_parts = plan.num_micro_batches if mesh.world.size == 1 else replicas
        what, is_scaled = "", config.precision.compute == "fp16"  # each step by another number
        if self._num_parts == 1 or replicas not in (1, mesh.world.size) or is_scaled:
            what = "it takes gradients of parts of a batch, in fp32 or bf16: ddp, or micro batches on one process"
        elif config.train.batch_warmup or self._batch_size % (plan.num_ranks * plan.num_micro_batches):
            what = "batches, and their parts, must have equally many samples"
        if what:
            raise ConfigError(what, where="train.noise_scale", value=True, fix="change that, or set it to false")
        self._averages = torch.zeros(2, dtype=torch.float64, device=mesh.world.device)
        self._part = torch.zeros_like(self._averages[0])  # squared norm of this process's part, so far

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Register what is measured: gradients before they are exchanged, or a first micro batch's; see `Transform`."""
        distributed.note_part = self._note
        distributed.after_backward.append(lambda: self._update(distributed))

    def _note(self, own: list[torch.Tensor]) -> None:
        self._part += compute_total_norm(own, None, self._part.device).double().square()

    def _update(self, distributed: Distributed) -> None:
        """Average in what this step has measured, unless it is not finite. Collective."""
        if self._num_processes > 1:
            dist.all_reduce(self._part)
        own, count = collect_local_gradients(distributed.model.parameters()), self._num_parts
        whole = compute_total_norm(own, None, self._part.device).double().square()
        # A part's loss is divided by the terms of the whole step: its mean gradient is as many times as large.
        part = self._part * count**2 / self._num_processes
        step = torch.stack([count * whole - part, self._batch_size * (part - whole)]) / (count - 1)
        self._averages.lerp_(torch.where(step.isfinite().all(), step, self._averages), 1 - DECAY)
        self._part.zero_()
        signal, noise = self._averages.unbind()  # both averages began with 0, which does not change their ratio
        distributed.metrics["noise_scale"] = torch.where(signal > 0, noise / signal, math.nan)
