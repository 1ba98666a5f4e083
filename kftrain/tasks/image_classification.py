"""One label for each image. Pixels are normalised with figures from the configuration, never from the data of a batch.

Each image is a block and thus a group of its own, in either split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field as Limits

from kftrain.data.schema import Arrays, Field, Record, SampleSchema
from kftrain.data.sources.decoding import load_library
from kftrain.errors import ConfigError, DataError
from kftrain.settings.section import Count
from kftrain.tasks.classification import Classification
from kftrain.tasks.fields import as_array

if TYPE_CHECKING:
    import torch

    from kftrain.tasks.base import Batch

_PILLOW_MODES = {1: "L", 3: "RGB"}
"""Channels of a resized image -> what Pillow calls it."""


class ImageClassification(Classification):
    """Predicts the class of square images; metrics `accuracy` and `cross_entropy` (nats per image).

    Args:
        image_size: Height and width in pixels.
        num_channels: Channels; 1 also accepts images without a channel dim.
        num_classes: Classes; labels are 0 to `num_classes` - 1.
        max_value: Pixel value that becomes 1.0.
        mean: Subtracted from pixels after scaling to 0 … 1.
        std: Divides them after that.
        labels: Names of the classes; empty: their numbers.
        resize: `none` refuses images of another shape. `crop` fits them: colours become grey or RGB as
            `num_channels` (1 or 3) says, transparency is dropped, the middle square is kept and scaled
            bilinearly.
    """

    input_column = "image"
    loss_unit = "nats per image"

    def __init__(
        self,
        *,
        image_size: Count,
        num_classes: Annotated[int, Limits(ge=2)],
        num_channels: Count = 1,
        max_value: Annotated[float, Limits(gt=0)] = 255.0,
        mean: float = 0.5,
        std: Annotated[float, Limits(gt=0)] = 0.5,
        labels: list[str] | None = None,
        resize: Literal["none", "crop"] = "none",
    ) -> None:
        super().__init__(num_classes=num_classes, labels=labels)
        self.image_size = image_size
        self.num_channels = num_channels
        self.max_value = max_value
        self.mean = mean
        self.std = std
        self.resize = resize
        if resize == "crop" and num_channels not in _PILLOW_MODES:
            raise ConfigError(
                "resize=crop makes grey or RGB images", where="task.num_channels", value=num_channels, fix="1 or 3"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width, channels: the layout in which images are kept."""
        return (self.image_size, self.image_size, self.num_channels)

    def schema(self) -> SampleSchema:
        """`image` `[height, width, channels]` uint8 and `label`."""
        return SampleSchema((Field("image", "uint8", self.image_shape), Field("label", "int64")))

    def settings(self) -> dict[str, Any]:
        """What the encoded bytes depend on; normalisation happens later."""
        return {
            "task": "image_classification",
            "image_shape": list(self.image_shape),
            "num_classes": self.num_classes,
            **({"resize": self.resize} if self.resize != "none" else {}),
        }

    def encode_field(self, record: Record, field: Field) -> np.ndarray:
        """The image and its label. Raises DataError for a wrong shape, pixel or label."""
        return self._image(record) if field.name == "image" else super().encode_field(record, field)

    def model_arguments(self) -> dict[str, Any]:
        """Sizes of images and the number of classes."""
        return {"image_size": self.image_size, "num_channels": self.num_channels, **super().model_arguments()}

    def batch(self, arrays: Arrays) -> Batch:
        """`image` `[rows, channels, height, width]` fp32, normalised, and `label` `[rows]`."""
        import torch

        pixels = np.ascontiguousarray(arrays["image"].transpose(0, 3, 1, 2), dtype=np.float32)
        return {
            "image": torch.from_numpy(pixels).div_(self.max_value).sub_(self.mean).div_(self.std),
            "label": torch.from_numpy(arrays["label"].astype(np.int64)),
        }

    def examples(self, model: torch.nn.Module, arrays: Arrays, batch: Batch) -> list[Mapping[str, Any]]:
        """The picture beside what is shown of any class."""
        pixels = np.clip(arrays["image"] * (255 / self.max_value), 0, 255).astype(np.uint8)
        pictures = pixels if self.num_channels == 3 else pixels[..., 0]
        shown = super().examples(model, arrays, batch)
        return [{"picture": picture, **each} for picture, each in zip(pictures, shown, strict=True)]

    def _image(self, record: Record) -> np.ndarray:
        """`[height, width, channels]` uint8."""
        if record.fields.get("image") is None:
            raise DataError(
                "the record has no image",
                where=record.key,
                value=sorted(record.fields),
                fix="name a source of images; beside text files they are left out",
            )
        image = as_array(record.fields["image"])
        if image is None:
            raise DataError("the image is not rectangular", where=record.key)
        if image.shape == self.image_shape[:2] and self.num_channels == 1:
            image = image[..., np.newaxis]
        if image.shape != self.image_shape and self.resize == "none":
            raise DataError(
                f"the image is not of shape {list(self.image_shape)}",
                where=record.key,
                value=list(image.shape),
                fix="task.resize=crop fits images of any size",
            )
        if image.dtype != np.uint8:
            image = _whole_pixels(image, record.key)
        return image if image.shape == self.image_shape else _fitted(image, self.image_shape, record.key)


def _fitted(image: np.ndarray, shape: tuple[int, int, int], key: str) -> np.ndarray:
    """The middle square of an image of 1 to 4 channels, in the size and colours of `shape`."""
    pillow, operations = (load_library(name, "task.resize") for name in ("PIL.Image", "PIL.ImageOps"))
    if image.ndim not in (2, 3) or 0 in image.shape or (image.ndim == 3 and image.shape[2] > 4):
        raise DataError(
            "not an image [height, width] or [height, width, 1 to 4 channels]", where=key, value=list(image.shape)
        )
    pixels = image[..., 0] if image.shape[2:] == (1,) else image
    converted = pillow.fromarray(np.ascontiguousarray(pixels)).convert(_PILLOW_MODES[shape[2]])
    fitted = operations.fit(converted, shape[:2], method=pillow.Resampling.BILINEAR)
    return np.asarray(fitted).reshape(shape)


def _whole_pixels(image: np.ndarray, key: str) -> np.ndarray:
    """The same as uint8. Raises DataError where that would change a value."""
    numeric = np.issubdtype(image.dtype, np.number)
    if not numeric or not ((image >= 0) & (image <= 255) & (image == np.floor(image))).all():
        raise DataError("pixels are not whole numbers from 0 to 255", where=key, value=str(image.dtype))
    return image.astype(np.uint8)
