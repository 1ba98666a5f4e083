"""One label for each image. Pixels are normalised with figures from the configuration, never from the data of a batch.

Each image is a block and thus a group of its own, in either split; labels and predictions are among the
per-group statistics, so that slices by class and the confusion table need no second pass over the data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field as Limits

from kftrain.data.schema import Arrays, Block, Field, Record, SampleSchema
from kftrain.data.sources.decoding import load_library
from kftrain.errors import ConfigError, DataError
from kftrain.settings.section import Count

if TYPE_CHECKING:
    import pandas
    import torch

    from kftrain.tasks.base import Batch

PREDICT_BATCH_ROWS = 256
"""Images of one forward pass in `predict`."""

_PILLOW_MODES = {1: "L", 3: "RGB"}
"""Channels of a resized image -> what Pillow calls it."""


class ImageClassification:
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
    loss_metric = "cross_entropy"

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
        self.image_size, self.num_channels, self.num_classes = image_size, num_channels, num_classes
        self.max_value, self.mean, self.std, self.resize = max_value, mean, std, resize
        self._names = list(labels or ())
        if labels and not len(set(labels)) == len(labels) == num_classes:
            raise ConfigError(
                f"needs {num_classes} different names",
                where="task.labels",
                value=labels,
                fix="one for each class",
            )
        if resize == "crop" and num_channels not in _PILLOW_MODES:
            raise ConfigError(
                "resize=crop makes grey or RGB images", where="task.num_channels", value=num_channels, fix="1 or 3"
            )

    @functools.cached_property
    def labels(self) -> list[str]:
        """Names of the classes. Made where they are asked for: who describes a task may claim any number of classes."""
        return self._names or [str(number) for number in range(self.num_classes)]

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

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        """One block for each image, by its key. Raises DataError for a wrong shape, pixel or label."""
        for record in records:
            image, label = self._image(record), self._label(record)
            yield Block(record.key, {"image": image[np.newaxis], "label": np.array([label], dtype=np.int64)})

    def baselines(self, records: Iterable[Record]) -> dict[str, dict[str, float]]:
        """Always answering the most frequent class, and answering the share of each class as its probability."""
        counts = np.bincount([self._label(record) for record in records], minlength=self.num_classes)
        if not counts.sum():
            return {}
        share = counts[counts > 0] / counts.sum()
        return {
            "accuracy": {"most frequent class": float(share.max())},
            "cross_entropy": {"class frequencies": float(-(share * np.log(share)).sum())},
        }

    def model_arguments(self) -> dict[str, Any]:
        """Sizes of images and the number of classes."""
        return {
            "image_size": self.image_size,
            "num_channels": self.num_channels,
            "num_classes": self.num_classes,
        }

    def count_terms(self, arrays: Arrays) -> np.ndarray:
        """One loss term for each image."""
        return np.ones(len(arrays["label"]), dtype=np.int64)

    def batch(self, arrays: Arrays) -> Batch:
        """`images` `[rows, channels, height, width]` fp32, normalised, and `labels` `[rows]`."""
        import torch

        pixels = np.ascontiguousarray(arrays["image"].transpose(0, 3, 1, 2), dtype=np.float32)
        return {
            "images": torch.from_numpy(pixels).div_(self.max_value).sub_(self.mean).div_(self.std),
            "labels": torch.from_numpy(arrays["label"].astype(np.int64)),
        }

    def loss(self, model: torch.nn.Module, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Summed cross-entropy in nats of images whose weight is not 0."""
        import torch.nn.functional as F  # noqa: N812 - the name that everybody uses

        losses = F.cross_entropy(model(batch["images"]).float(), batch["labels"], reduction="none")
        return (losses * weight).sum()

    def statistics(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Per image: `correct`, `cross_entropy` in nats, `count` (1), `label` and `prediction`."""
        import torch

        labels = batch["labels"]
        log_probabilities = torch.log_softmax(model(batch["images"]).float(), dim=-1)
        predictions = log_probabilities.argmax(dim=-1)
        return {
            "correct": (predictions == labels).double(),
            "cross_entropy": -log_probabilities.double().gather(1, labels.unsqueeze(1)).squeeze(1),
            "count": torch.ones_like(labels).double(),
            "label": labels.double(),
            "prediction": predictions.double(),
        }

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Accuracy and mean cross-entropy; not a number where there are no images."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "accuracy": np.asarray(sums["correct"]) / sums["count"],
                "cross_entropy": np.asarray(sums["cross_entropy"]) / sums["count"],
            }

    def slice_names(self, keys: list[str], statistics: Mapping[str, np.ndarray]) -> list[str]:
        """The class of each image."""
        return [self.labels[int(label)] for label in statistics["label"]]

    def confusion(self, statistics: Mapping[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
        """Counts of true class (row) against predicted class (column)."""
        matrix = np.zeros((self.num_classes, self.num_classes), dtype=np.int64)
        pairs = (
            np.asarray(statistics["label"], dtype=np.int64),
            np.asarray(statistics["prediction"], dtype=np.int64),
        )
        np.add.at(matrix, pairs, 1)
        return self.labels, matrix

    def examples(self, model: torch.nn.Module, arrays: Arrays, batch: Batch) -> list[Mapping[str, Any]]:
        """The picture, its class, the predicted one and the probability that the model gives to each of the two."""
        probabilities = model(batch["images"]).float().softmax(dim=-1).cpu().numpy()
        pixels = np.clip(arrays["image"] * (255 / self.max_value), 0, 255).astype(np.uint8)
        pictures = pixels if self.num_channels == 3 else pixels[..., 0]
        return [
            {
                "picture": picture,
                "class": f"{self.labels[label]} (p = {row[label]:.3f})",
                "predicted": f"{self.labels[row.argmax()]} (p = {row.max():.3f})",
            }
            for picture, label, row in zip(pictures, arrays["label"].tolist(), probabilities, strict=True)
        ]

    def predict(self, model: torch.nn.Module, inputs: pandas.DataFrame) -> pandas.DataFrame:
        """Probability of each class, one column per label.

        `inputs` has a column `image` (arrays or nested lists `[height, width]` or `[height, width,
        channels]`), or nothing but the pixels, one column each in that order. Raises DataError for anything
        else.
        """
        import pandas

        from kftrain.tasks.inference import map_batches

        images = np.empty((len(inputs), *self.image_shape), dtype=np.uint8)
        for row, record in enumerate(self._records(inputs)):
            images[row] = self._image(record)
        rows: Arrays = {"image": images, "label": np.zeros(len(inputs), dtype=np.int64)}
        parts = map_batches(
            self,
            model,
            rows,
            PREDICT_BATCH_ROWS,
            lambda batch: {"p": model(batch["images"]).float().softmax(dim=-1)},
        )
        probabilities = [np.empty((0, self.num_classes), dtype=np.float32), *(part["p"] for part in parts)]
        return pandas.DataFrame(np.concatenate(probabilities), columns=self.labels, index=inputs.index)

    def _records(self, inputs: pandas.DataFrame) -> Iterator[Record]:
        if "image" in inputs:
            images: Iterable[Any] = inputs["image"]
        elif inputs.shape[1] == np.prod(self.image_shape):
            images = inputs.to_numpy().reshape(-1, *self.image_shape)
        else:
            raise DataError(
                f"the input needs a column 'image' or {np.prod(self.image_shape)} columns of pixels",
                where="predict",
                value=f"{inputs.shape[1]} columns",
            )
        for index, image in zip(inputs.index, images, strict=True):
            yield Record(f"row {index}", {"image": image})

    def _image(self, record: Record) -> np.ndarray:
        """`[height, width, channels]` uint8."""
        if record.fields.get("image") is None:
            raise DataError(
                "the record has no image",
                where=record.key,
                value=sorted(record.fields),
                fix="name a source of images; beside text files they are left out",
            )
        try:
            image = np.asarray(_as_lists(record.fields["image"]))
        except ValueError as error:
            raise DataError("the image is not rectangular", where=record.key) from error
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

    def _label(self, record: Record) -> int:
        names, label = record.fields.get("class_names"), record.fields.get("label")
        if names is not None and len(names) != self.num_classes:
            raise DataError(
                f"the source has {len(names)} classes, the task {self.num_classes}",
                where=record.key,
                value=", ".join(names),
                fix=f"task.num_classes={len(names)}",
            )
        if not isinstance(label, int | np.integer) or not 0 <= label < self.num_classes:
            raise DataError(f"the label is not one of 0 to {self.num_classes - 1}", where=record.key, value=label)
        return int(label)


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


def _as_lists(image: Any) -> Any:
    """Arrays of arrays, as data frames hold them, as nested lists; anything else as it is."""
    if isinstance(image, np.ndarray) and image.dtype == object:
        return [_as_lists(part) for part in image]
    return image


def _whole_pixels(image: np.ndarray, key: str) -> np.ndarray:
    """The same as uint8. Raises DataError where that would change a value."""
    numeric = np.issubdtype(image.dtype, np.number)
    if not numeric or not ((image >= 0) & (image <= 255) & (image == np.floor(image))).all():
        raise DataError("pixels are not whole numbers from 0 to 255", where=key, value=str(image.dtype))
    return image.astype(np.uint8)
