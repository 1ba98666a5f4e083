"""The files that a registered version carries besides its reference, so that a stranger's machine can serve it. Pure.

    MLmodel, reference.json        the model by reference
    python_env.yaml, conda.yaml, requirements.txt, constraints.txt    the environment, as MLflow's env managers read it
    wheels/<digest>/kftrain-….whl  kftrain itself
    input_example.json             a row that `predict` takes
    model_card.md                  what the model is, for people

Installers look for relative places of wheels beside the file that names them, whatever folder they run in. MLflow
reads requirements.txt by itself and stumbles over options in it, but not over those of a constraints file; uv reads
none there. So the place of the wheel stands twice: in constraints.txt, and in python_env.yaml.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from kftrain.core import storage
from kftrain.registry.wheel import Wheel

LEAST = {
    "torch": "torch>=2.11",
    "safetensors": "safetensors>=0.5",
    "numpy": "numpy>=1.26",
    "tokenizers": "tokenizers>=0.20",
}
"""Package -> requirement of a model whose run did not record the versions that it was trained with."""

STORES = {"s3": ("s3fs", "botocore"), "gs": ("gcsfs",), "gcs": ("gcsfs",), "abfs": ("adlfs",), "abfss": ("adlfs",)}
"""Scheme of a storage root -> packages that read it."""

MODEL_CARD = "model_card.md"


@dataclass(frozen=True)
class ModelPackage:
    """The content of a version for people and servers, from which `files` makes its files."""

    card: str = ""
    """The model card in Markdown; empty: none."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Settings of the training, for MLflow's table of models."""
    requirements: tuple[str, ...] = ()
    """Lines of `requirements.txt`; empty: the version carries no environment."""
    wheel: Wheel | None = None
    input_example: Mapping[str, Any] = field(default_factory=dict)
    """Column -> its value in one row, plain; empty: none is known."""
    answer_types: Mapping[str, str] = field(default_factory=dict)
    """Column of the answer -> its type in MLflow's words."""

    def files(self) -> dict[str, bytes]:
        """Make the files of the version: path in the version -> content."""
        files = {MODEL_CARD: self.card.encode()} if self.card else {}
        if self.input_example:
            split = {"columns": list(self.input_example), "data": [list(self.input_example.values())]}
            files["input_example.json"] = storage.dump_json(split).encode()
            files["serving_input_example.json"] = storage.dump_json({"dataframe_split": split}).encode()
        return {**files, **self._make_environment()} if self.requirements else files

    def _make_environment(self) -> dict[str, bytes]:
        python = platform.python_version()
        places: list[str] = []
        own: list[str] = []
        files: dict[str, bytes] = {}
        if self.wheel is not None:
            folder = f"wheels/{self.wheel.digest}"
            places, own = [f"--find-links {folder}"], [f"kftrain=={self.wheel.version}"]
            files["constraints.txt"] = f"{places[0]}\n".encode()
            files[f"{folder}/{self.wheel.file_name}"] = self.wheel.content
        env = {
            "python": python,
            "build_dependencies": ["pip", "setuptools", "wheel"],
            "dependencies": [*places, "-r requirements.txt"],
        }
        conda = {
            "name": "mlflow-env",
            "channels": ["conda-forge"],
            "dependencies": [f"python={python}", "pip", {"pip": [*places, *self.requirements, *own]}],
        }
        lines = [*(["-c constraints.txt"] if own else []), *self.requirements, *own]
        files["requirements.txt"] = "".join(f"{line}\n" for line in lines).encode()
        files["python_env.yaml"] = yaml.safe_dump(env, sort_keys=False).encode()
        files["conda.yaml"] = yaml.safe_dump(conda, sort_keys=False).encode()
        return files


def requirements(trained_with: Mapping[str, str], installed: Mapping[str, str], export_uri: str) -> tuple[str, ...]:
    """List what a server of a model must install besides kftrain, pinned if the version is known.

    Args:
        trained_with: Distribution -> version, of those that the training used.
        installed: Distribution -> version, of those on this machine: MLflow, and what reads the storage.
        export_uri: Place of the model; its scheme tells which packages read it.
    """
    pins = {name: f"{name}=={version.partition('+')[0]}" for name, version in trained_with.items()}
    lines = pins or dict(LEAST)
    for name in ("mlflow", *STORES.get(export_uri.partition("://")[0], ())):
        lines[name] = f"{name}=={installed[name]}" if name in installed else name
    return tuple(lines[name] for name in sorted(lines))
