"""Classification of images. Pixels are normalised with figures from the configuration, never from a batch's data.

Each image is a block and thus a group of its own, in either split. Shards hold its pixels, all images in one size, or
its file as it came, which is decoded each time that it is read: then a training image may be cut out anew every epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field as Limits
from pydantic import model_validator

from kftrain.data import images
from kftrain.data.file_content import load_library
from kftrain.data.images import Box, middle_square
from kftrain.data.schema import BYTES, Arrays, Block, Field, Record, SampleSchema
from kftrain.errors import ConfigError, DataError
from kftrain.settings.section import Count, Section
from kftrain.tasks.classification import Classification
from kftrain.tasks.fields import as_array, as_field, as_object, extension_of

if TYPE_CHECKING:
    import torch

    from kftrain.tasks.base import Batch

MAX_EXAMPLE_PIXELS = 4096
"""Largest example that is registered with a model."""

_CHANNELS = (1, 3)
"""Numbers of channels to which an image's colours can be converted."""

Figures = float | list[float]
"""One number for all channels, or one for each."""

Share = Annotated[float, Limits(gt=0.0, le=1.0)]
Positive = Annotated[float, Limits(gt=0.0)]

TRIES = 10
"""Number of tries before the middle is taken: images may be so narrow that hardly any part has a wanted shape."""


class ImageClassification(Classification):
    """Predicts the class of square images; metrics `accuracy` and `cross_entropy` (nats per image).

    Args:
        image_size: Height and width in pixels.
        num_channels: Channels; 1 also accepts images without a channel dim.
        num_classes: Classes; labels are 0 to `num_classes` - 1.
        max_value: Pixel value that becomes 1.0.
        mean: Number to subtract from pixels after scaling to 0 … 1; one number, or one for each channel.
        std: Number to divide them by after that; one number, or one for each channel.
        labels: Names of the classes; empty: their numbers.
        resize: `none` refuses images of another shape. `crop` fits them: colours become grey or RGB as
            `num_channels` (1 or 3) says, transparency is dropped, the middle square is kept and scaled
            bilinearly.
        storage: Content of the shards: `pixels`, or `files`, each as it came (JPEG, PNG, WebP, BMP, PPM, TIFF, GIF) and
            decoded when it is read, upright and in the colours that `num_channels` says. With files another size needs
            no new shards.
        augment: Random changes in training: `crop_scale`, `crop_ratio`, `flip`; see `Augment`.
    """

    input_column = "image"
    reading_options = frozenset({"max_value", "mean", "std", "augment"})
    loss_unit = "nats per image"

    def __init__(
        self,
        *,
        image_size: Count,
        num_classes: Annotated[int, Limits(ge=2)],
        num_channels: Count = 1,
        max_value: Annotated[float, Limits(gt=0)] = 255.0,
        mean: Figures = 0.5,
        std: Annotated[float, Limits(gt=0)] | list[Annotated[float, Limits(gt=0)]] = 0.5,
        labels: list[str] | None = None,
        resize: Literal["none", "crop"] = "none",
        storage: Literal["pixels", "files"] = "pixels",
        augment: Augment | None = None,
    ) -> None:
        super().__init__(num_classes=num_classes, labels=labels)
        self.image_size = image_size
        self.num_channels = num_channels
        self.max_value = max_value
        self.mean = mean
        self.std = std
        self.resize = resize
        self.storage = storage
        self.augment = augment
        self._check()

    def _check(self) -> None:
        for name, is_set in (
            ("resize=crop", self.resize == "crop"),
            ("storage=files", self.storage == "files"),
            ("augment", self.augment is not None),
        ):
            if is_set and self.num_channels not in _CHANNELS:
                raise ConfigError(
                    f"{name} makes grey or RGB images",
                    where="task.num_channels",
                    value=self.num_channels,
                    fix="1 or 3",
                )
        for name, figures in (("mean", self.mean), ("std", self.std)):
            if isinstance(figures, list) and len(figures) != self.num_channels:
                raise ConfigError(
                    f"needs one number, or {self.num_channels}, one for each channel",
                    where=f"task.{name}",
                    value=figures,
                )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels: the layout of stored images."""
        return (self.image_size, self.image_size, self.num_channels)

    def schema(self) -> SampleSchema:
        """Return the fields `image`, `[height, width, channels]` uint8 or a file, and `label`."""
        files = Field("image", BYTES, extensions=images.EXTENSIONS)
        image = files if self.storage == "files" else Field("image", "uint8", self.image_shape)
        return SampleSchema((image, Field("label", "int64")))

    def input_example(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the pixels of a small image; empty for a large one or a file, whose numbers nobody would read."""
        image = np.asarray(sample["image"])
        return {"image": image.tolist()} if 0 < image.size <= MAX_EXAMPLE_PIXELS and image.ndim else {}

    def settings(self) -> dict[str, Any]:
        """Return what the encoded bytes depend on; normalising and decoding of files happen later."""
        if self.storage == "files":
            return {"task": "image_classification", "storage": "files", "num_classes": self.num_classes}
        return {
            "task": "image_classification",
            "image_shape": list(self.image_shape),
            "num_classes": self.num_classes,
            **({"resize": self.resize} if self.resize != "none" else {}),
        }

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        """Yield each image with its label. Raises DataError for what is no image, as far as a file's header shows."""
        return super().encode(map(self._add_file, records) if self.storage == "files" else records, split)

    def encode_field(self, record: Record, field: Field) -> np.ndarray:
        """Make the image or the label of a record. Raises DataError for a wrong shape, pixel or label."""
        if field.name != "image":
            return super().encode_field(record, field)
        if self.storage == "files" and (extension_of(record, field) or isinstance(record.fields.get("image"), bytes)):
            file = as_field(record, field)
            images.check_image(file.item(), record.key)
            return file
        pixels = self._read_pixels(record)
        return as_object(pixels) if self.storage == "files" else pixels

    def model_arguments(self) -> dict[str, Any]:
        """Return the sizes of images and the number of classes."""
        return {"image_size": self.image_size, "num_channels": self.num_channels, **super().model_arguments()}

    @property
    def decodes(self) -> bool:
        """True if samples are files, or augmented."""
        return self.storage == "files" or self.augment is not None

    def decode(self, sample: Arrays, generator: np.random.Generator | None) -> Arrays:
        """Cut `image` out as `[height, width, channels]` uint8: a random part in training, else the middle square.

        Raises DataError if it cannot be decoded, or has another size and the task does not resize.
        """
        image = sample["image"]
        if image is None:  # the row of an empty data frame
            pixels = np.zeros(self.image_shape, np.uint8)
        elif generator is None or self.augment is None:
            pixels = self._decode_part(image, images.middle_square)
        else:
            pixels = self._decode_part(image, partial(self.augment.choose, generator))
            if self.augment.flips(generator):
                pixels = pixels[:, ::-1]
        return {**sample, "image": pixels}

    def batch(self, arrays: Arrays) -> Batch:
        """Make `image` `[rows, channels, height, width]` fp32, normalised, and `label` `[rows]`."""
        import torch

        pixels = np.ascontiguousarray(arrays["image"].transpose(0, 3, 1, 2), dtype=np.float32)
        mean, std = (
            torch.tensor(figures).view(-1, 1, 1) if isinstance(figures, list) else figures
            for figures in (self.mean, self.std)
        )
        return {
            "image": torch.from_numpy(pixels).div_(self.max_value).sub_(mean).div_(std),
            "label": torch.from_numpy(arrays["label"].astype(np.int64)),
        }

    def examples(self, model: torch.nn.Module, arrays: Arrays, batch: Batch) -> list[Mapping[str, Any]]:
        """Show the picture beside the classes."""
        pixels = np.clip(arrays["image"] * (255 / self.max_value), 0, 255).astype(np.uint8)
        pictures = pixels if self.num_channels == 3 else pixels[..., 0]
        classes = super().examples(model, arrays, batch)
        return [{"picture": picture, **texts} for picture, texts in zip(pictures, classes, strict=True)]

    def _add_file(self, record: Record) -> Record:
        """Turn the image's bytes, as a user's source may give them, into a file with an extension."""
        if extension_of(record, self.schema().fields[0]):
            return record
        content = record.fields.get("image")
        if not isinstance(content, bytes):
            raise DataError("the record has no image file", where=record.key, fix="set task.storage=pixels")
        extension = images.image_extension(content)
        if not extension:
            raise DataError("the image is of no known kind", where=record.key, value=f"{content[:16]!r}")
        return replace(record, files={**record.files, extension: content})

    def _decode_part(self, image: Any, choose: images.ChooseBox) -> np.ndarray:
        """Decode the chosen part of a file or of pixels, in the task's size and colours."""
        if not isinstance(image, np.ndarray):
            return images.decode_part(image, self.image_size, self.num_channels, partial(self._choose_part, choose), "")
        height, width = image.shape[:2]
        return images.scaled(images.from_pixels(image), self.image_size, self.num_channels, choose(width, height))

    def _choose_part(self, choose: images.ChooseBox, width: int, height: int) -> images.Box:
        if self.resize == "none" and (width, height) != (self.image_size, self.image_size):
            raise DataError(
                f"the image is not {self.image_size} x {self.image_size} pixels",
                value=f"{width} x {height}",
                fix="task.resize=crop fits images of any size",
            )
        return choose(width, height)

    def _read_pixels(self, record: Record) -> np.ndarray:
        """Read a record's image as pixels `[height, width, channels]` uint8. Raises DataError."""
        if record.fields.get("image") is None:
            raise DataError(
                "the record has no image",
                where=record.key,
                value=sorted(record.fields),
                fix="name a source of images; beside text files they are left out",
            )
        given = record.fields["image"]
        image = images.decode_image(given, record.key) if isinstance(given, bytes) else as_array(given)
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
            image = _convert_pixels(image, record.key)
        return image if image.shape == self.image_shape else _fit_image(image, self.image_shape, record.key)


def _fit_image(image: np.ndarray, shape: tuple[int, int, int], key: str) -> np.ndarray:
    """Scale the middle square of an image of 1 to 4 channels to the size and colours of `shape`."""
    load_library("PIL.Image", "task.resize")
    if image.ndim not in (2, 3) or 0 in image.shape or (image.ndim == 3 and image.shape[2] > 4):
        raise DataError(
            "not an image [height, width] or [height, width, 1 to 4 channels]", where=key, value=list(image.shape)
        )
    height, width = image.shape[:2]
    return images.scaled(images.from_pixels(image), shape[0], shape[2], images.middle_square(width, height))


def _convert_pixels(image: np.ndarray, key: str) -> np.ndarray:
    """Convert pixels to uint8. Raises DataError if that would change a value."""
    numeric = np.issubdtype(image.dtype, np.number)
    if not numeric or not ((image >= 0) & (image <= 255) & (image == np.floor(image))).all():
        raise DataError("pixels are not whole numbers from 0 to 255", where=key, value=str(image.dtype))
    return image.astype(np.uint8)


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
