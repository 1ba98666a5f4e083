"""The section `model`."""

from __future__ import annotations

from kftrain.settings.section import ChangesTraining, Plugin


class ModelConfig(Plugin):
    """The network. Further keys belong to the model."""

    kind: ChangesTraining[str] = "transformer"
    """`transformer`, `vision_transformer`, or a user's `module:attr`."""
