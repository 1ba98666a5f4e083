"""Scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, part of the package, so no download."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from kftrain.data.schema import Record, Source, SourcePart
from kftrain.errors import ConfigError


class DigitsSource(Source):
    """Records `digit-00000` …: `{"image": uint8 [8, 8] of 0..16, "label": int}`.

    Raises ConfigError where scikit-learn is not installed.
    """

    def listing(self) -> list[dict[str, Any]]:
        """List the package's version and the digest of its content."""
        version, images, labels = _load()
        digest = hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()
        return [{"name": "digits", "version": version, "sha256": digest}]

    def parts(self, target_bytes: int) -> list[SourcePart]:
        """Return one part."""
        return [SourcePart(tuple(self.listing()))]

    def read(self, part: SourcePart) -> Iterator[Record]:
        """Yield all images in the package's order."""
        _, images, labels = _load()
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            yield Record(f"digit-{number:05d}", {"image": image, "label": label})


@functools.cache
def _load() -> tuple[str, np.ndarray, np.ndarray]:
    try:
        import sklearn
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            f"the source 'digits' needs scikit-learn ({error})",
            where="data.source",
            fix="pip install 'kftrain[train]'",
        ) from error
    digits = load_digits()
    return sklearn.__version__, digits.images.astype(np.uint8), digits.target
