import io
import struct
import sys
import zlib
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers.source_checks import Sharded, reading_memory, records, resolve
from PIL import Image

from kftrain.data.images import decode_image
from kftrain.errors import ConfigError, DataError
from kftrain.tasks.image_classification import ImageClassification

RNG = np.random.default_rng(0)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, **options) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


# -- folders ---------------------------------------------------------------------------------------------------------


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = ["bee/2.png", "bee/10.PNG", "ant/sub/1.png", "Cat/1.bmp", "bee/.hidden.png"]
    written = {name: save(tmp_path / name, noise(4 + n, 6)) for n, name in enumerate(names)}
    (tmp_path / "empty").mkdir()
    (tmp_path / "ant" / "boxes.xml").write_text("left out")
    found = records(tmp_path)
    assert [record.key for record in found] == ["Cat/1.bmp", "ant/sub/1.png", "bee/10.PNG", "bee/2.png"]
    assert [record.fields["label"] for record in found] == [0, 1, 2, 2]
    for record in found:
        assert record.split == "" and record.fields["class_names"] == ("Cat", "ant", "bee")
        assert record.fields["image"].dtype == np.uint8
        assert np.array_equal(record.fields["image"], written[record.key])


def test_the_listing_names_the_images_and_stays_the_same(tmp_path: Path) -> None:
    for name in ("b/1.png", "a/2.png"):
        save(tmp_path / name, noise(2, 2))
    listing = resolve(tmp_path).listing()
    assert [line["name"] for line in listing] == ["a/2.png", "b/1.png"] and listing == resolve(tmp_path).listing()
    save(tmp_path / "a/2.png", noise(3, 3))
    assert resolve(tmp_path).listing() != listing


@pytest.mark.parametrize(
    ("folders", "held_out"),
    [
        (["train", "test"], "test"),
        (["train", "val", "test"], "val"),
        (["train", "validation", "val", "test"], "validation"),
    ],
)
def test_a_folder_that_is_split_already_decides_itself(tmp_path: Path, folders: list[str], held_out: str) -> None:
    for folder in folders:
        for name in ("ant", "bee"):
            save(tmp_path / folder / name / "1.png", noise(2, 2))
    expected = {f"train/{name}/1.png": ("train", n) for n, name in enumerate(("ant", "bee"))}
    expected |= {f"{held_out}/{name}/1.png": ("validation", n) for n, name in enumerate(("ant", "bee"))}
    found = {record.key: (record.split, record.fields["label"]) for record in records(tmp_path)}
    assert found == expected
    assert [line["name"] for line in resolve(tmp_path).listing()] == sorted(expected)


def test_classes_may_be_called_like_splits(tmp_path: Path) -> None:
    names = ["car", "test", "train"]
    for name in names:
        save(tmp_path / name / "1.png", noise(2, 2))
    assert [(record.key, record.split) for record in records(tmp_path)] == [(f"{name}/1.png", "") for name in names]


def test_a_class_that_is_only_held_out_is_refused(tmp_path: Path) -> None:
    for name in ("train/ant", "train/bee", "val/bee", "val/wasp"):
        save(tmp_path / name / "1.png", noise(2, 2))
    with pytest.raises(DataError, match=r"val/wasp/1\.png: the class 'wasp' is not among those in 'train' .*ant.*bee"):
        records(tmp_path)


@pytest.mark.parametrize("names", [["1.png"], ["ant/1.png", "2.png"], ["train/1.png", "val/ant/1.png"]])
def test_an_image_without_a_class_is_refused_when_it_is_listed(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        save(tmp_path / name, noise(2, 2))
    with pytest.raises(DataError, match=r"\d\.png: an image without a class; put each image below a folder"):
        resolve(tmp_path).listing()


def test_train_alone_is_refused_because_it_would_be_the_only_class(tmp_path: Path) -> None:
    save(tmp_path / "train/ant/1.png", noise(2, 2))
    with pytest.raises(DataError, match=r"'train' and nothing beside it; name .*/train, or add validation or val or"):
        resolve(tmp_path).listing()
    assert [record.key for record in records(tmp_path / "train")] == ["ant/1.png"]


def test_a_corrupt_image_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "ant/1.png", noise(20, 20))
    whole = encoded(Image.fromarray(noise(20, 20)), "JPEG")
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        (tmp_path / "ant/2.jpg").write_bytes(content)
        with pytest.raises(DataError, match=r"ant/2\.jpg: the image cannot be decoded: .*replace or delete it"):
            records(tmp_path)


def test_pillow_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "ant/1.png", noise(2, 2))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"needs PIL.Image .*pip install 'kftrain\[sources\]'"):
        records(tmp_path)


def test_a_folder_in_an_object_store_is_read_like_a_local_one(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for name in ("ant/1.png", "bee/1.png"):
        save(tmp_path / name, noise(2, 3))
        store.pipe_file(f"/photos/{name}", (tmp_path / name).read_bytes())
    for remote, local in zip(records("memory://photos"), records(tmp_path), strict=True):
        assert remote.key == local.key and np.array_equal(remote.fields["image"], local.fields["image"])
    store.rm("/photos", recursive=True)


# -- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "channels"), [("1", 1), ("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4), ("P", 3)])
def test_pixels_keep_their_channels_and_palettes_become_colours(mode: str, channels: int) -> None:
    image = Image.fromarray(noise(5, 7)).convert(mode)
    pixels = decode_image(encoded(image, "PNG"), "x")
    assert pixels.shape == (5, 7, channels) and pixels.dtype == np.uint8
    expected = np.asarray(image.convert({"1": "L", "P": "RGB"}.get(mode, mode)))
    assert np.array_equal(pixels.squeeze(), expected)


def test_a_palette_with_transparency_keeps_its_colours_and_gets_an_alpha_channel() -> None:
    image = Image.fromarray(noise(5, 7)).convert("P")
    content = encoded(image, "PNG", transparency=bytes(range(256)))
    pixels = decode_image(content, "x")
    assert pixels.shape == (5, 7, 4)
    assert np.array_equal(pixels[..., :3], np.asarray(image.convert("RGB")))
    assert np.array_equal(pixels[..., 3], np.asarray(image))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF", "BMP", "PPM", "GIF"])
def test_each_format_is_decoded_as_pillow_does(kind: str) -> None:
    content = encoded(Image.fromarray(noise(9, 11)), kind)
    with Image.open(io.BytesIO(content)) as image:
        assert np.array_equal(decode_image(content, "x"), np.asarray(image.convert("RGB")))


def test_cmyk_becomes_rgb() -> None:
    content = encoded(Image.fromarray(noise(8, 8)).convert("CMYK"), "JPEG")
    with Image.open(io.BytesIO(content)) as image:
        assert np.array_equal(decode_image(content, "x"), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [(1, lambda a: a), (3, lambda a: a[::-1, ::-1]), (6, lambda a: np.rot90(a, -1)), (8, lambda a: np.rot90(a))],
)
def test_a_photo_is_turned_upright_as_its_exif_says(orientation: int, upright) -> None:
    pixels = noise(4, 6)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = orientation
    assert np.array_equal(decode_image(encoded(image, "PNG", exif=exif), "x"), upright(pixels))


def test_more_than_eight_bits_are_refused_rather_than_cut_off() -> None:
    content = encoded(Image.fromarray(np.full((4, 4), 40_000, np.uint16)), "PNG")
    with pytest.raises(DataError, match=r"x: the image does not have 8 bits per channel \(got 'mode I;16'\)"):
        decode_image(content, "x")


@pytest.mark.parametrize("kind", ["EPS", "TGA"])
def test_other_formats_are_refused_even_under_a_known_suffix(kind: str) -> None:
    """Pillow would start Ghostscript for the first one."""
    content = encoded(Image.fromarray(noise(4, 4)), kind)
    with pytest.raises(DataError, match="cannot be decoded"):
        decode_image(content, "x")


@pytest.mark.parametrize("side", [9_600, 40_000])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(side: int) -> None:
    """Above Pillow's limit, where it warns, and above twice that, where it refuses."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(DataError, match=r"x: the image is too large: .*scale it down"):
        decode_image(bomb, "x")


@pytest.mark.filterwarnings("ignore")
def test_damage_anywhere_is_a_data_error_or_an_image(capfd: pytest.CaptureFixture[str]) -> None:
    image = Image.fromarray(noise(16, 16))
    exif = image.getexif()
    exif[0x0112] = 6
    contents = [encoded(image, kind, exif=exif) for kind in ("JPEG", "PNG", "WEBP", "TIFF")]
    contents += [encoded(image.convert("P"), kind) for kind in ("PNG", "GIF", "BMP")]
    refused = 0
    for content in contents * 60:
        damaged = bytearray(content)
        for position in RNG.integers(0, len(damaged), 4):
            damaged[position] = RNG.integers(256)
        try:
            assert decode_image(bytes(damaged), "x").dtype == np.uint8
        except DataError:
            refused += 1
    assert 50 < refused < 420
    capfd.readouterr()  # libtiff's own complaints


# -- sharding and memory ---------------------------------------------------------------------------------------------


def test_sharding_holds_the_images_of_both_splits(tmp_path: Path) -> None:
    expected: dict[str, dict] = {"train": {}, "validation": {}}
    for number in range(12):
        for folder, split in (("train", "train"), ("val", "validation")):
            key = f"{folder}/{'ab'[number % 2]}/{number}.png"
            expected[split][key] = save(tmp_path / "in" / key, noise(8, 8)), number % 2
    task = ImageClassification(image_size=8, num_channels=3, num_classes=2)
    sharded = Sharded(tmp_path / "in", tmp_path / "root", task)
    assert sharded.reused
    for split, written in expected.items():
        found = sharded.images(split)
        assert found.keys() == written.keys()
        assert all(np.array_equal(found[key][0], pixels) for key, (pixels, _) in written.items())
        assert all(found[key][1] == label for key, (_, label) in written.items())


def test_photos_of_many_sizes_and_colours_are_sharded_where_the_task_crops(tmp_path: Path) -> None:
    for number in range(30):
        pixels = noise(20 + number, 50 - number, (1, 3, 4)[number % 3])
        save(tmp_path / "in" / "abc"[number % 3] / f"{number}.png", pixels)
    task = ImageClassification(image_size=16, num_channels=3, num_classes=3, resize="crop")
    first = Sharded(tmp_path / "in", tmp_path / "one", task)
    second = Sharded(tmp_path / "in", tmp_path / "two", task)
    assert len({**first.images("train"), **first.images("validation")}) == 30
    assert first.result.dataset_digest == second.result.dataset_digest
    with pytest.raises(DataError, match=r"not of shape \[16, 16, 3\].*task\.resize=crop"):
        Sharded(tmp_path / "in", tmp_path / "three", ImageClassification(image_size=16, num_channels=3, num_classes=3))


def test_another_number_of_folders_than_classes_is_refused_with_both(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cat"):
        for number in range(9):
            save(tmp_path / "in" / name / f"{number}.png", noise(8, 8))
    for num_classes in (2, 4):
        task = ImageClassification(image_size=8, num_channels=3, num_classes=num_classes)
        message = rf"the source has 3 classes, the task {num_classes} \(got 'ant, bee, cat'\); task\.num_classes=3"
        with pytest.raises(DataError, match=message):
            Sharded(tmp_path / "in", tmp_path / "root", task)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    pixels = np.zeros((500, 500, 3), np.uint8)
    for number in range(200):
        save(tmp_path / "ab"[number % 2] / f"{number:03d}.png", pixels)
    count, growth = reading_memory(tmp_path, "PIL.Image", "PIL.ImageOps")
    assert count == 200 and growth < 20e6
    assert reading_memory(tmp_path, "PIL.Image", "PIL.ImageOps", keep=True)[1] > 200 * pixels.nbytes
