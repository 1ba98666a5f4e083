"""The section `model`."""

from __future__ import annotations

from kftrain.settings.section import Plugin


class ModelConfig(Plugin):
    """The network. Further keys belong to the model."""

    kind: str = "transformer"
    """`transformer`, `vision_transformer`, or a user's `module:attr`."""
