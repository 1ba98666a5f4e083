"""Folders of images, one folder for each class, as torchvision's `ImageFolder` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from kftrain.core import storage
from kftrain.data.file_content import HELD_OUT_NAMES, IMAGE_SUFFIXES, choose_held_out_name, is_image
from kftrain.data.images import decode_image
from kftrain.data.schema import Lazy, LazyFields, Record, SourcePart
from kftrain.errors import DataError
from kftrain.sharding.sources.file_source import FileSource
from kftrain.sharding.sources.listing import ListedFile, SourceFile, reading_source
from kftrain.sharding.sources.pieces import Piece, group_pieces, make_whole_piece

_LAYOUT = "put each image below a folder that is named after its class"


class ImageFolderSource(FileSource):
    """`<class>/<image>`, or `train/<class>/<image>` beside `validation`, `val` or `test`: one record per image.

    Key = path in the folder. Classes are numbered in the order of their names. Where the folder is split
    already, `validation` comes before `val` before `test`: the first that is there is our validation split and
    the others are left out. In a window of time the classes are those of all images, so that they keep their numbers;
    folders that only say the time are none.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri, is_image, f"images ({' '.join(IMAGE_SUFFIXES)})")

    def entries(self) -> list[SourceFile]:
        """Return the images of the splits that are used, sorted by name.

        Raises DataError where there are none, and for an image without a class.
        """
        listed, splits = self._list_with_splits()
        return [image.entry for image in self._find_images(self._selection.chosen(listed, self.uri), splits)]

    def parts(self, target_bytes: int) -> list[SourcePart]:
        """Group the images, sorted by name.

        A class that is new may give all classes other numbers: then each part changes.

        Raises DataError.
        """
        listed, splits = self._list_with_splits()
        everything = self._find_images([file_of.file for file_of in listed], splits)
        images = self._find_images(self._selection.chosen(listed, self.uri), splits)
        context = {"splits": splits, "class_names": list(_collect_class_names(everything))}
        pieces = (make_whole_piece(image.entry) for image in images)
        return group_pieces(pieces, target_bytes, context, self._selection.folder_of)

    def read(self, part: SourcePart) -> Iterator[Record]:
        """Yield `{"image": uint8 [height, width, channels], "label": int, "class_names": all of them}`, sorted by key.

        With the file as it came; an image is decoded when its pixels are asked for. Raises DataError naming the file.
        """
        class_names = tuple(part.context["class_names"])
        numbers = {name: number for number, name in enumerate(class_names)}
        for document in part.pieces:
            image = self._locate_image(Piece.from_dict(document).file, part.context["splits"])
            with reading_source(image.entry.uri):
                content = storage.read_bytes(image.entry.uri)
            fields = LazyFields(
                {"label": numbers[image.class_name], "class_names": class_names},
                {"image": Lazy(content, partial(decode_image, where=image.entry.uri))},
            )
            extension = image.entry.name.rsplit(".", 1)[-1].lower()
            yield Record(image.entry.name, fields, image.split, {extension: content})

    def _list_with_splits(self) -> tuple[list[ListedFile], dict[str, str]]:
        """List all files, and the split that each of the first folders stands for: none where a hash decides."""
        listed = self.list_all()
        held_out = _find_held_out_folder({self._find_top_folder(listed_file.file) for listed_file in listed}, self.uri)
        return listed, {} if held_out is None else {"train": "train", held_out: "validation"}

    def _find_images(self, entries: list[SourceFile], splits: dict[str, str]) -> list[_Image]:
        """Locate the images that are used."""
        return [
            self._locate_image(entry, splits)
            for entry in entries
            if not splits or self._find_top_folder(entry) in splits
        ]

    def _locate_image(self, entry: SourceFile, splits: dict[str, str]) -> _Image:
        split = splits.get(self._find_top_folder(entry), "")
        folders = self._selection.without_dates(entry.name).split("/")[bool(split) : -1]
        if not folders:
            raise DataError("an image without a class", where=entry.uri, fix=_LAYOUT)
        return _Image(entry, split, folders[0])

    def _find_top_folder(self, entry: SourceFile) -> str:
        """Return the first folder of a path, but for those of dates; '' for a file that is in none."""
        first, has_folder, _ = self._selection.without_dates(entry.name).partition("/")
        return first if has_folder else ""


class _Image(NamedTuple):
    entry: SourceFile
    split: str
    class_name: str


def _find_held_out_folder(folders: set[str], where: str) -> str | None:
    """Return the folder that is our validation split; None where the folders are classes.

    Raises DataError for a lone `train`, which would be the only class.
    """
    if "train" not in folders or not folders <= {"train", *HELD_OUT_NAMES}:
        return None
    if folders == {"train"}:
        raise DataError(
            "the folder has 'train' and nothing beside it",
            where=where,
            fix=f"name {storage.join(where, 'train')}, or add {' or '.join(HELD_OUT_NAMES)}",
        )
    return choose_held_out_name(folders)


def _collect_class_names(images: list[_Image]) -> tuple[str, ...]:
    """Return the classes that are trained on. Raises DataError for an image of any other."""
    names = {image.class_name for image in images if image.split != "validation"}
    for image in images:
        if image.class_name not in names:
            raise DataError(
                f"the class '{image.class_name}' is not among those in 'train'",
                where=image.entry.uri,
                value=sorted(names),
                fix="add it there, or leave it out here",
            )
    return tuple(sorted(names))
