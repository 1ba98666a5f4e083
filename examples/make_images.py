"""Makes a folder of images for examples/images.yaml, without a network: photos-like JPEG, PNG and WebP of mixed sizes.

    python examples/make_images.py FOLDER [--images 1500] [--seed 0]

FOLDER/<class>/<number>.<extension>: patterns of five kinds in random colours, sizes and places, some grey, some on
their side with an EXIF note that says so. The same arguments make the same pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

Pattern = Callable[[np.ndarray, np.ndarray], np.ndarray]

CLASSES: dict[str, Pattern] = {
    "checks": lambda x, y: np.sign(np.sin(x) * np.sin(y)),
    "dots": lambda x, y: np.where(np.sin(x) * np.sin(y) > 0.6, 1.0, -1.0),
    "plain": lambda x, y: np.zeros_like(x),
    "rings": lambda x, y: np.sin(np.hypot(x, y)),
    "stripes": lambda x, y: np.sin(x + y),
}
"""Name -> brightness from -1 to 1 at places whose distances are in waves."""

SIDES = (40, 240)
ORIENTATION, ON_ITS_SIDE = 0x0112, 6
"""EXIF tag, and its value for an image that is to be turned clockwise."""


def draw(pattern: Pattern, generator: np.random.Generator) -> Image.Image:
    """An image of one class: a pattern between two colours, under noise."""
    width, height = generator.integers(*SIDES, size=2).tolist()
    waves = generator.uniform(3.0, 6.0) * 2 * np.pi / min(width, height)
    center = generator.uniform(0.2, 0.8, size=2) * (width, height)
    x, y = np.meshgrid(np.arange(width) - center[0], np.arange(height) - center[1])
    brightness = (pattern(x * waves, y * waves)[..., np.newaxis] + 1) / 2
    dark, light = generator.uniform(0, 100, size=3), generator.uniform(150, 255, size=3)
    pixels = dark + (light - dark) * brightness + generator.normal(0, 12, size=(height, width, 1))
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return image.convert("L") if generator.random() < 0.1 else image


def save(image: Image.Image, stem: Path, generator: np.random.Generator) -> None:
    """Writes it as JPEG mostly; every tenth JPEG lies on its side."""
    extension = generator.choice(["jpg", "jpg", "jpg", "png", "webp"])
    exif = Image.Exif()
    if extension == "jpg" and generator.random() < 0.1:
        exif[ORIENTATION] = ON_ITS_SIDE
        image = image.transpose(Image.Transpose.ROTATE_90)
    image.save(f"{stem}.{extension}", exif=exif)


def make(folder: Path, num_images: int, seed: int = 0) -> None:
    """Writes the images, equally many of each class."""
    generator, names = np.random.default_rng(seed), list(CLASSES)
    for number in range(num_images):
        name = names[number % len(names)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        save(draw(CLASSES[name], generator), folder / name / f"{number:05d}", generator)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, arguments.images, arguments.seed)
    print(f"{arguments.images} images of {len(CLASSES)} classes in {arguments.folder}")


if __name__ == "__main__":
    main()
