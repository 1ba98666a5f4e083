"""Random changes of training images: which part of an image is seen, and from which side. Imports numpy only."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from kftrain.data.images import Box, middle_square
from kftrain.settings.section import Section

Share = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]

TRIES = 10
"""Number of tries before the middle is taken: images may be so narrow that hardly any part has a wanted shape."""


class Augment(Section):
    """Changes of training images at random; evaluation and `predict` see the middle square."""

    crop_scale: tuple[Share, Share] | None = None
    """Least and largest share of an image's area that is cut out at random and scaled; none: the middle square."""
    crop_ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Least and largest ratio of width to height of what is cut out."""
    flip: bool = False
    """Mirror every other image left to right, chosen at random."""

    @model_validator(mode="after")
    def _check(self) -> Augment:
        for low, high in (self.crop_scale or (1.0, 1.0), self.crop_ratio):
            if low > high:
                raise ValueError(f"{low} is more than {high}")
        return self

    def choose(self, generator: np.random.Generator, width: int, height: int) -> Box:
        """Choose the part of an image to show: of random area, shape and place, with Inception's distributions."""
        if self.crop_scale is None:
            return middle_square(width, height)
        low, high = (math.log(ratio) for ratio in self.crop_ratio)
        for _ in range(TRIES):
            area = width * height * generator.uniform(*self.crop_scale)
            ratio = math.exp(generator.uniform(low, high))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                left, top = (
                    float(generator.integers(0, room, endpoint=True)) for room in (width - across, height - down)
                )
                return left, top, left + across, top + down
        return middle_part(width, height, *self.crop_ratio)

    def flips(self, generator: np.random.Generator) -> bool:
        """Draw a random number and return True if this image is to be mirrored."""
        return self.flip and bool(generator.random() < 0.5)


def middle_part(width: int, height: int, low: float, high: float) -> Box:
    """Return the largest part in the middle whose ratio of width to height lies between `low` and `high`."""
    across, down = min(width, height * high), min(height, width / low)
    left, top = (width - across) / 2, (height - down) / 2
    return left, top, left + across, top + down
