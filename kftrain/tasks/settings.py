"""The section `task`."""

from __future__ import annotations

from kftrain.settings.section import ChangesTraining, Plugin


class TaskConfig(Plugin):
    """What is learned. Further keys belong to the task."""

    kind: ChangesTraining[str] = "language_modeling"
    """`language_modeling`, `image_classification`, or a user's `module:attr`."""
