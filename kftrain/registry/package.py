"""The files that a registered version carries besides its reference, so that a stranger's machine can serve it.

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

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import platform
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kftrain.core import storage
from kftrain.errors import TrackingError

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


NAME = "kftrain"
OUTSIDE = ("kftrain.components", "kftrain.pipelines")
"""Packages that stand elsewhere in a checkout, and inside the package once it is installed."""


@dataclass(frozen=True)
class Wheel:
    """A wheel of the kftrain that runs, in memory."""

    version: str
    """Version of the installed kftrain, without the wheel's local part."""
    digest: str
    """First 12 characters of the digest of its files; the local part of its version."""
    content: bytes

    @property
    def file_name(self) -> str:
        """Name of the file in the form that installers require."""
        return f"{NAME}-{self.version}+{self.digest}-py3-none-any.whl"


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


def list_requirements(
    trained_with: Mapping[str, str], installed: Mapping[str, str], export_uri: str
) -> tuple[str, ...]:
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


def make_own_wheel() -> Wheel:
    """Make the wheel of the kftrain that runs; equal files give equal bytes.

    No package index need have this very code. The wheel is made without a build: kftrain is pure Python, so its modules
    and the metadata of its installation are all there is. The local part of its version, the digest of its files, is
    one that no index can have: an installer that finds both takes this one.

    Raises TrackingError if kftrain is not installed as a package, or its metadata are damaged.
    """
    # Why not MLflow's code_paths: a loading process gets them at the front of sys.path for the rest of its life. Where
    # kftrain is installed, `import kftrain` would then give the old code of a version, with its old checks of what may
    # be loaded; and code_paths brings none of kftrain's own requirements. A wheel goes where kftrain is not installed.
    try:
        installed = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError as error:
        raise TrackingError("kftrain is not installed as a package", fix="pip install it") from error
    files = dict(sorted(_read_modules().items()))
    listing = "".join(f"{name} {hashlib.sha256(content).hexdigest()}\n" for name, content in files.items())
    digest = hashlib.sha256(listing.encode()).hexdigest()[:12]
    folder = f"{NAME}-{installed.version}+{digest}.dist-info"
    metadata = installed.read_text("METADATA") or ""
    stated, version = f"\nVersion: {installed.version}\n", f"\nVersion: {installed.version}+{digest}\n"
    if stated not in metadata:
        raise TrackingError("the metadata of kftrain's installation are not whole", fix="install it again")
    files[f"{folder}/METADATA"] = metadata.replace(stated, version, 1).encode()
    files[f"{folder}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: kftrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{folder}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    return Wheel(installed.version, digest, _pack(files, f"{folder}/RECORD"))


def _read_modules() -> dict[str, bytes]:
    """Read every file of the package except compiled ones: path in the wheel -> content."""
    contents: dict[str, bytes] = {}
    for package in (NAME, *OUTSIDE):
        spec = importlib.util.find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(place).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    inside = path.relative_to(place).as_posix()
                    contents[f"{package.replace('.', '/')}/{inside}"] = path.read_bytes()
    return contents


def _pack(files: dict[str, bytes], record: str) -> bytes:
    """Zip the files with their RECORD; a fixed time makes the bytes depend on the files alone."""
    lines, buffer = list[str](), io.BytesIO()
    epoch = (1980, 1, 1, 0, 0, 0)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}\n")
            archive.writestr(zipfile.ZipInfo(name, epoch), content, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo(record, epoch), "".join([*lines, f"{record},,\n"]), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
