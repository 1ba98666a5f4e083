"""The records: 442 patients, ten measurements each, and how far their disease had progressed after a year."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def records() -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs of key and fields, in the same order every time. Measurements have mean 0 and variance 1."""
    from sklearn.datasets import load_diabetes

    patients = load_diabetes()
    features = patients.data * np.sqrt(len(patients.data))  # scikit-learn gives columns of norm 1
    for number, (row, target) in enumerate(zip(features, patients.target, strict=True)):
        yield f"patient-{number:03d}", {"features": row.astype(np.float32), "target": float(target)}
