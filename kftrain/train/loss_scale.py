"""Dynamic loss scaling: fp16 has no number below 6e-8 but 0, and most gradients are smaller (arXiv:1710.03740).

The loss is multiplied by a scale before the backward pass, and gradients are divided by it once they are in fp32 and
summed over processes. Where one of them is not finite, the step is skipped and the scale halved; after so many steps in
a row without that, it grows. Torch's kernels do both, those of `torch.amp.GradScaler`; nothing of it is known to the
host, and all processes have the same scale, because all skip the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kftrain.parallel import gradients
from kftrain.parallel.distributed import Distributed, Part
from kftrain.parallel.settings import LossScaleConfig

BACKOFF_FACTOR = 0.5
"""Factor on the scale after a step that was skipped."""

PART = "loss_scale"
"""Name of the part of a checkpoint, and of the metric."""

NUM_SKIPPED = "skipped_steps"
"""Name of the metric that counts the steps that were skipped."""


class LossScale:
    """The scale of a training's loss; a transform, and the first one, so that it unscales when all gradients are there.

    Hooks of the model's own come later: they see gradients as without a scale.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        """Begin with the configured scale, on the device where losses are."""
        self._config = config
        self._scale = torch.full((), config.initial, dtype=torch.float32, device=device)
        self._num_good_steps = torch.zeros((), dtype=torch.int32, device=device)
        """Number of steps in a row that were not skipped, since the scale has changed."""
        self._num_skipped = torch.zeros((), dtype=torch.int64, device=device)
        """Number of steps that were skipped, since the run began."""
        self._found_inf = torch.zeros((), device=device)
        self._parameters: list[torch.Tensor] = []

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Register the unscaling, and the part of the checkpoint; see `Transform`."""
        distributed.when_filled.append(lambda: self._parameters.extend(distributed.model.parameters()))
        distributed.after_backward.append(self._unscale)
        distributed.parts[PART] = Part(1, self._save, self._load, is_optional=True)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale: what the backward pass begins with."""
        return loss * self._scale

    def unscale_sum(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a sum of scaled losses without the scale, in fp64."""
        return loss.double() / self._scale.double()

    @property
    def overflow(self) -> torch.Tensor:
        """Infinity where a gradient of this process was not finite in this step, else 0: one more number of the norm.

        A hook of the model may have made another number of it since.
        """
        return self._found_inf.atanh()  # of 1 it is infinite, of 0 it is 0

    def update(self, found_inf: torch.Tensor) -> dict[str, torch.Tensor]:
        """Grow or halve the scale after a step; `found_inf`: 1 where it was skipped, on all processes, else 0.

        Return the metrics of the step, scalars on the device.
        """
        found_inf, used = found_inf.to(self._scale.device), self._scale.clone()
        self._num_skipped = self._num_skipped + found_inf.long()  # another tensor: the one before may be on its way
        growth = self._config.growth_factor, BACKOFF_FACTOR, self._config.growth_interval_steps
        torch._amp_update_scale_(self._scale, self._num_good_steps, found_inf, *growth)
        self._scale.clamp_(min=self._config.minimum)
        return {PART: used, NUM_SKIPPED: self._num_skipped}

    def _unscale(self) -> None:
        """Divide all gradients by the scale, and note whether one of them is not finite."""
        scaled = gradients.collect_local_gradients(self._parameters)
        device = scaled[0].device if scaled else self._scale.device  # offloaded gradients are on the host
        self._found_inf = torch.zeros((), device=device)
        if scaled:
            factor = self._scale.reciprocal().to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(scaled, self._found_inf, factor)

    def _save(self) -> dict[str, Any]:
        return {"scale": self._scale, "num_good_steps": self._num_good_steps, "num_skipped": self._num_skipped}

    def _load(self, state: dict[str, Any]) -> None:
        for name, tensor in self._save().items():
            tensor.copy_(state[name])
