"""The section `task`."""

from __future__ import annotations

from kftrain.settings.section import ChangesTraining, Plugin


class TaskConfig(Plugin):
    """The task: what is learned. Further keys are the task's own options."""

    kind: ChangesTraining[str] = "language_modeling"
    """Task to learn: `language_modeling`, `image_classification`, or `module:attr` of your own."""
