"""The pipeline as YAML, byte for byte the same every time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kfp.compiler import Compiler

from kftrain.pipelines.train import train_pipeline


def compiled() -> str:
    """The intermediate representation that the Kubeflow UI and the local runner both take."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        Compiler().compile(train_pipeline, str(path))
        return path.read_text()
