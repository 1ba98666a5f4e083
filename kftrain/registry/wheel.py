"""Packs the installed kftrain into a wheel, which a server of a registered model installs.

A registered version must load on a machine that knows nothing of kftrain, and no package index need have this very
code. The wheel is made without a build: kftrain is pure Python, so its modules and the metadata of its installation
are all there is. Its version has a local part, the digest of its files, which no index can have: an installer that
finds both takes this one.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kftrain.errors import TrackingError

NAME = "kftrain"
OUTSIDE = ("kftrain.components", "kftrain.pipelines")
"""Packages that stand elsewhere in a checkout, and inside the package once it is installed."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
_TAG = "py3-none-any"


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
        return f"{NAME}-{self.version}+{self.digest}-{_TAG}.whl"


def own_wheel() -> Wheel:
    """Make the wheel of the kftrain that runs; equal files give equal bytes.

    Raises TrackingError if kftrain is not installed as a package, or its metadata are damaged.
    """
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
    files[f"{folder}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: kftrain\nRoot-Is-Purelib: true\nTag: {_TAG}\n".encode()
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
    """Zip the files with their RECORD; the fixed time of `_EPOCH` makes the bytes depend on the files alone."""
    lines = []
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(content)}\n")
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo(record, _EPOCH), "".join([*lines, f"{record},,\n"]), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
