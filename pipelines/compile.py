"""The pipeline as YAML, byte for byte the same every time."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from kfp.compiler import Compiler, KubernetesManifestOptions

from kftrain import __version__
from kftrain.core import storage
from kftrain.pipelines.promote import promote_pipeline
from kftrain.pipelines.train import train_pipeline

PIPELINE_NAME: str = train_pipeline.name
PIPELINE_DESCRIPTION: str = train_pipeline.description

PIPELINES = {"train": train_pipeline, "promote": promote_pipeline}

DIGEST_CHARACTERS = 8
"""Of the compiled pipeline's digest, how many tell its versions apart: 32 bits."""


def compiled(pipeline: str = "train") -> str:
    """The intermediate representation that the Kubeflow UI and the local runner both take, of `train` or `promote`."""
    return _compile(PIPELINES[pipeline])


def version_name(pipeline_name: str = PIPELINE_NAME) -> str:
    """What this very pipeline is called as a version: by the release and by a digest of what is compiled.

    The same content has the same name everywhere. It is a Kubernetes name, and those are shared by the versions of all
    pipelines of a namespace: that is why the pipeline's own name is in it.
    """
    release = re.sub(r"[^a-z0-9.]+", "-", __version__.lower())
    return f"{pipeline_name}-{release}-{storage.sha256_text(compiled())[:DIGEST_CHARACTERS]}"


def manifests(namespace: str = "", pipeline_name: str = "", version: str = "") -> str:
    """The Kubernetes resources Pipeline and PipelineVersion, as one YAML text.

    Args:
        namespace: Where they are created; empty: where `kubectl apply` is told to.
        pipeline_name: Name of the Pipeline; empty: the pipeline's own.
        version: Name of the PipelineVersion; empty: `version_name`.
    """
    name = pipeline_name or PIPELINE_NAME
    options = KubernetesManifestOptions(
        pipeline_name=name,
        pipeline_version_name=version or version_name(name),
        namespace=namespace or None,
        include_pipeline_manifest=True,
    )
    return _compile(train_pipeline, kubernetes_manifest_format=True, kubernetes_manifest_options=options)


def _compile(pipeline: Any, **options: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        Compiler().compile(pipeline, str(path), **options)
        return path.read_text()
