"""Builds the images and puts them into a cluster that has no registry, sending only layers that it does not hold.

Each image has two stages: dependencies (hundreds of megabytes, changed rarely) and our code (two megabytes). The first
is loaded once as a whole archive; after that an archive with the code's layers alone is enough, since containerd finds
the other layers by their digests.
"""

import io
import json
import shlex
import subprocess
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFERENCE = "org.opencontainers.image.ref.name"


@dataclass(frozen=True)
class Builder:
    """How this machine builds images and loads archives: both are commands of the user's."""

    engine: str
    """`buildah`: archives hold only new layers; `docker` or `podman`: whole images."""
    load_command: str
    """Takes one archive: `kind load image-archive`, `minikube image load` …"""
    base: str
    flags: str = ""
    """Further arguments of `<engine> build`."""
    cache: Path = ROOT / ".e2e"
    root: Path = ROOT
    """The source tree."""

    def ensure(self, name: str, held: set[str]) -> str:
        """The image `name` of the present code, built, and loaded where the nodes do not hold it; returns its tag."""
        dependencies = self.dependencies(name)
        image = self._build(name)
        if image in held:
            return image
        if dependencies not in held:
            self._load(self._archive(dependencies, f"kftrain-0-{name}"))
        self._load(self._archive(image, f"kftrain-1-{name}", without=dependencies))
        return image

    def dependencies(self, name: str) -> str:
        """The image below the code of image `name`, built."""
        return self._build(name, "dependencies")

    def derive(self, name: str, dockerfile: str, context: str, base: str, held: Collection[str] = ()) -> str:
        """A user's image, built from the image `base` of ours, loaded unless it is among `held`; returns its tag."""
        image = self._image(name, ["--build-arg", f"BASE={base}", "-f", dockerfile, context])
        if image in held:
            return image
        self._load(self._archive(image, f"kftrain-2-{name}", without=base))
        return image

    def _build(self, name: str, target: str = "") -> str:
        stage = ["--target", target] if target else []
        arguments = [*stage, "--build-arg", f"BASE={self.base}", "-f", f"images/{name}/Dockerfile", "."]
        return self._image(f"{name}-{target}" if target else name, arguments)

    def _image(self, name: str, arguments: list[str]) -> str:
        """Builds, and tags by the image's own digest: a tag never means two things."""
        self.cache.mkdir(exist_ok=True)
        identity = self.cache / "identity"
        layers = ["--layers"] if self.engine == "buildah" else []
        self._call([self.engine, "build", *layers, "--iidfile", str(identity), *shlex.split(self.flags), *arguments])
        digest = identity.read_text().strip().removeprefix("sha256:")
        tag = f"localhost/kftrain-{name}:{digest[:12]}"
        self._call([self.engine, "tag", digest, tag])
        return tag

    def _archive(self, image: str, file_name: str, without: str = "") -> Path:
        """An archive of an image; of its layers only those that the image `without` lacks, where the engine can."""
        archive = self.cache / f"{file_name}.tar"
        archive.unlink(missing_ok=True)
        if self.engine != "buildah":
            self._call([self.engine, "save", "-o", str(archive), image])
            return archive
        descriptor, blobs = self._layout(image)
        held = set(self._layout(without)[1][1:]) if without else set()
        with tarfile.open(archive, "w") as tar:
            tar.add(self._folder / "oci-layout", "oci-layout")
            _add_text(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [descriptor]}))
            for digest in [descriptor["digest"], *blobs]:
                if digest not in held:
                    name = f"blobs/sha256/{digest.removeprefix('sha256:')}"
                    tar.add(self._folder / name, name)
        return archive

    def _layout(self, image: str) -> tuple[dict, list[str]]:
        """The image in an OCI layout, where no layer is compressed twice: its descriptor, its blobs."""
        found = self._find_descriptor(image)  # a tag never means two things
        if found is None:
            self._call(["buildah", "push", "--quiet", image, f"oci:{self._folder}:{image}"])
            found = self._find_descriptor(image)
        assert found is not None, image
        manifest = json.loads((self._folder / "blobs/sha256" / found["digest"].removeprefix("sha256:")).read_text())
        return found, [part["digest"] for part in (manifest["config"], *manifest["layers"])]

    def _find_descriptor(self, image: str) -> dict | None:
        index = self._folder / "index.json"
        listed = json.loads(index.read_text())["manifests"] if index.exists() else []
        return next((one for one in listed if one.get("annotations", {}).get(REFERENCE) == image), None)

    @property
    def _folder(self) -> Path:
        return self.cache / "layout"

    def _load(self, archive: Path) -> None:
        self._call([*shlex.split(self.load_command), str(archive)])
        archive.unlink()

    def _call(self, command: list[str]) -> None:
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text)
    tar.addfile(entry, io.BytesIO(text.encode()))
