"""Storage of encoded parts: they are found by what they were made from, and encoded where they are missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.data.schema import SPLITS, Source, SourcePart
from kftrain.data.shards.manifest import index_name, reading
from kftrain.data.shards.staging import publish_folder, staging_folder
from kftrain.errors import DataError
from kftrain.sharding.parts.document import PART_NAME, PARTS_FOLDER, PartDocument, read_part
from kftrain.sharding.parts.encoder import Encoding, encode_part
from kftrain.sharding.parts.records import RECORDS_NAME

Level = Literal["sha256", "size", "replaced"]


@dataclass(frozen=True)
class PartStore:
    """The parts below a storage root, of one way of encoding."""

    shards_uri: str
    encoding: Encoding
    level: Level = "size"
    """Comparison of a part before it is used again: everything, or lengths; training compares the rest. `replaced`:
    files of the source may hold something else; a part of before, which knows no state, is made anew."""

    def uri(self, part_digest: str) -> str:
        """Return the folder of a part."""
        return storage.join(self.shards_uri, PARTS_FOLDER, part_digest)

    def find(self, input_digest: str, state: str) -> PartDocument | None:
        """Read the part that was made from this input in this state, if its files are there and unchanged."""
        try:
            target = storage.read_json_if_exists(self._build_pointer_uri(input_digest))
            if target is None or (target["state"] != state if "state" in target else self.level == "replaced"):
                return None
            uri = self.uri(target["part_digest"])
            document = read_part(uri)
            self._verify(uri, document, self.level)
        except (DataError, ValueError, KeyError, TypeError):  # not where storage is away: it may be as it was
            return None
        return document

    def obtain(
        self, source: Source, part: SourcePart, input_digest: str, progress: Progress
    ) -> tuple[PartDocument, bool]:
        """Return the part of this input, and whether it was there. Raises as `encode` does."""
        document = self.find(input_digest, part.state)
        return (document, True) if document else (self.encode(source, part, progress), False)

    def encode(self, source: Source, part: SourcePart, progress: Progress) -> PartDocument:
        """Read, encode and publish a part. Raises DataError, UserCodeError, or RetryableError for a full disk."""
        with storage.explain_disk_errors(self.shards_uri), staging_folder(self.shards_uri) as folder:
            document = encode_part(self.encoding, source.read(part), folder, progress)
            storage.publish_json(str(folder / PART_NAME), document.to_dict())
            # Named by its content: two processes that encode the same part publish equal bytes, and either one may
            # stay.
            publish_folder(folder, self.uri(document.part_digest), PART_NAME, self._is_good)
        return document

    def keep(self, input_digest: str, part_digest: str, state: str) -> None:
        """Let the part be found by its input, which must be known not to have changed while it was read."""
        storage.publish_json(self._build_pointer_uri(input_digest), {"part_digest": part_digest, "state": state})

    def _build_pointer_uri(self, input_digest: str) -> str:
        return storage.join(self.shards_uri, PARTS_FOLDER, "by-input", f"{input_digest}.json")

    def _is_good(self, uri: str) -> bool:
        try:
            self._verify(uri, read_part(uri), "sha256")
        except DataError:
            return False
        return True

    def _verify(self, uri: str, document: PartDocument, level: Level) -> None:
        _require_file(storage.join(uri, RECORDS_NAME), document.records_sha256)
        for shard in (shard for split in SPLITS for shard in document.splits[split]):
            _require_file(storage.join(uri, index_name(shard.name)), shard.index_sha256)
            _require_file(storage.join(uri, shard.name), shard.sha256 if level == "sha256" else shard.bytes)


def _require_file(uri: str, expected: str | int) -> None:
    """Raise DataError for a file of another digest, or another size."""
    with reading(uri):
        actual = storage.sha256_file(uri) if isinstance(expected, str) else storage.size_bytes(uri)
    if actual != expected:
        raise DataError("it is not as it was written", where=uri, value=actual, fix="shard the data again")
