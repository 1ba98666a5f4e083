"""The section `model`."""

from __future__ import annotations

from kftrain.settings.section import ChangesTraining, Plugin


class ModelConfig(Plugin):
    """The network. Further keys are the model's own options."""

    kind: ChangesTraining[str] = "transformer"
    """Network to train: `transformer`, `vision_transformer`, or `module:attr` of your own."""
