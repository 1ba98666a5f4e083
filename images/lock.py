"""Writes the lock files of the images: `make lock`; `make lock LOCK=--upgrade` takes the newest that is allowed.

They hold for Python 3.10 and newer, with the hashes of PyPI. torch and the CUDA libraries that its build wants are in
a file of their own: who builds for CPUs takes another wheel of the same torch, which has other hashes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")

EXTRAS = {"steps": ["kfp", "kubeflow", "mlflow", "s3", "sources"], "trainer": ["train", "tracking", "s3"]}
"""Of each image. The trainer's is made last: kfp pins what the other has to take as well."""

RAY = "images/trainer/ray.lock"
"""What a trainer image has besides where it is built for `launch.backend: rayjob`."""

TOOLS = {"installer": ["uv"], "sbom": ["cyclonedx-bom>=7"]}
"""What installs the rest, and what lists it: the second is not in the images."""

CUDA = re.compile(r"(torch|triton|(nvidia|cuda)-[a-z0-9-]+)==")


def main(options: list[str]) -> None:
    """Compiles all of them."""
    before: list[str] = []
    for name, extras in EXTRAS.items():
        lock = f"images/{name}/requirements.lock"
        chosen = [part for extra in extras for part in ("--extra", extra)]
        compile_lock(lock, ["pyproject.toml", *chosen, "-c", "constraints.txt", *before, *options])
        before = ["-c", lock]
    split(ROOT / lock, ROOT / "images" / "trainer" / "cuda.lock")
    compile_lock(RAY, ["pyproject.toml", "--extra", "ray", *before, *options])
    for name, wanted in TOOLS.items():
        compile_lock(f"images/{name}.lock", ["-", *options], "\n".join(wanted))


def compile_lock(path: str, arguments: list[str], wanted: str = "") -> None:
    """Writes one file; what it pins already stays as long as it may."""
    environment = {key: value for key, value in os.environ.items() if key != "UV_FIND_LINKS"}
    fixed = ["--universal", "--python-version", "3.10", "--generate-hashes", "--no-annotate", "--quiet"]
    command = [UV, "pip", "compile", *arguments, *fixed, "--custom-compile-command", "make lock", "-o", path]
    subprocess.run(command, cwd=ROOT, env=environment, input=wanted, text=True, stdout=subprocess.DEVNULL, check=True)


def split(lock: Path, cuda: Path) -> None:
    """Moves torch and what only its CUDA build wants into a file of its own."""
    header, *pins = re.split(r"^(?=[a-z0-9])", lock.read_text(), flags=re.MULTILINE)
    cuda.write_text(header + "".join(pin for pin in pins if CUDA.match(pin)))
    lock.write_text(header + "".join(pin for pin in pins if not CUDA.match(pin)))


if __name__ == "__main__":
    main(sys.argv[1:])
