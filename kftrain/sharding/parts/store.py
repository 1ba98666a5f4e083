"""Storage of encoded parts: they are found by what they were made from, and encoded where they are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kftrain.core import storage, threads
from kftrain.core.progress import Progress
from kftrain.data.schema import SPLITS, Source, SourcePart
from kftrain.data.shards.manifest import index_name, reading
from kftrain.data.shards.staging import publish_folder, staging_folder
from kftrain.errors import DataError
from kftrain.sharding.parts.document import PART_NAME, PARTS_FOLDER, PartDocument, read_part
from kftrain.sharding.parts.encoder import Encoding, encode_part
from kftrain.sharding.parts.records import RECORDS_NAME

Level = Literal["sha256", "size", "replaced"]

THREADS = 16
"""Parts that are looked for at the same time: each is some requests."""


@dataclass(frozen=True)
class PartStore:
    """The parts below a storage root, of one way of encoding."""

    shards_uri: str
    encoding: Encoding
    level: Level = "size"
    """Comparison of a part before it is used again: everything, or lengths; training compares the rest. `replaced`:
    files of the source may hold something else; a part of before, which knows no state, is made anew."""
    pending: str = ""
    """Folder of pointers to parts that pods have encoded: `find` looks there, too, and `keep` writes there. Those of
    `by-input` come when the whole source is known to be unchanged."""

    def uri(self, part_digest: str) -> str:
        """Return the folder of a part."""
        return storage.join(self.shards_uri, PARTS_FOLDER, part_digest)

    def find(self, input_digest: str, state: str) -> PartDocument | None:
        """Read the part that was made from this input in this state, if its files are there and unchanged."""
        folders = filter(None, (self.pending, self._by_input))
        documents = (self._follow(storage.join(folder, f"{input_digest}.json"), state) for folder in folders)
        return next(filter(None, documents), None)

    def find_all(self, jobs: Mapping[int, Any]) -> dict[int, PartDocument]:
        """Find the parts of many inputs, by their numbers; those that are not there are left out: see `find`."""
        inputs = [(job["input_digest"], job["state"]) for job in jobs.values()]
        documents = threads.call_together(lambda known: self.find(*known), inputs, THREADS)
        return {number: document for number, document in zip(jobs, documents, strict=True) if document}

    def _follow(self, pointer: str, state: str) -> PartDocument | None:
        try:
            target = storage.read_json_if_exists(pointer)
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
        # That of a release before has no tables of digests: what is there tells.
        return read_part(self.uri(document.part_digest))

    def keep(self, input_digest: str, part_digest: str, state: str) -> None:
        """Let the part be found by its input, which must be known not to have changed while it was read."""
        uri = storage.join(self.pending or self._by_input, f"{input_digest}.json")
        storage.publish_json(uri, {"part_digest": part_digest, "state": state})

    @property
    def _by_input(self) -> str:
        return storage.join(self.shards_uri, PARTS_FOLDER, "by-input")

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
