"""An object store in memory that counts: what is asked for, where, and how many bytes come or go.

It lies below `kftrain.core.storage` and `remote`, as the driver of `counted://`, so whatever the product asks a store
for is counted, by whichever way it asks. Like S3 it answers a listing in pages of 1,000 names, which are one `list`
here with that many `num_requests`. Objects may be of a size alone, so that datasets of any size cost nothing.
"""

import errno
import hashlib
import io
import itertools
import threading
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone

import fsspec

NAMES_OF_A_PAGE = 1000

SCHEME = "counted"


@dataclass(frozen=True)
class Request:
    """One question of a driver to its store."""

    kind: str
    """`head`, `get`, `list`, `put` or `delete`."""
    uri: str
    num_bytes: int = 0
    """Of content that came or went."""
    num_requests: int = 1


@dataclass(frozen=True)
class _Object:
    size_bytes: int
    content: bytes | None
    etag: str


class CountingStore:
    """The objects, and the requests since the last `take`. Any thread may ask."""

    def __init__(self):
        self.objects = {}
        self._requests = []
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def uri(self, *parts):
        """Where something of this store is."""
        return "/".join([f"{SCHEME}://bucket", *parts])

    def put(self, uri, content=None, size_bytes=0):
        """Lay an object there, which is not counted. Without content it is of a size alone, and read as zeros."""
        size = size_bytes if content is None else len(content)
        digest = hashlib.md5(content or b"", usedforsecurity=False).hexdigest()
        with self._lock:
            self.objects[uri.removeprefix(f"{SCHEME}://")] = _Object(size, content, f"{digest}-{next(self._numbers)}")

    def content(self, uri):
        """The content of an object, which is not counted."""
        return self.objects[uri.removeprefix(f"{SCHEME}://")].content

    def remove(self, uri):
        """Take away an object, which is not counted."""
        del self.objects[uri.removeprefix(f"{SCHEME}://")]

    def note(self, kind, path, num_bytes=0, num_requests=1):
        """Count a request."""
        with self._lock:
            self._requests.append(Request(kind, f"{SCHEME}://{path}", num_bytes, num_requests))

    def take(self):
        """The requests since the last call, in the order in which they came."""
        with self._lock:
            taken, self._requests = self._requests, []
        return taken


def count(requests, kind="", below=""):
    """Number of requests of a kind, below a URI."""
    return sum(one.num_requests for one in requests if one.kind.startswith(kind) and one.uri.startswith(below))


def count_bytes(requests, kind="get", below=""):
    """Bytes that came (`get`) or went (`put`)."""
    return sum(one.num_bytes for one in requests if one.kind == kind and one.uri.startswith(below))


def describe(requests):
    """For a failed assertion: kind and URI -> how often."""
    return dict(Counter((one.kind, one.uri) for one in requests))


class _FileSystem(fsspec.AbstractFileSystem):
    """The driver. Folders are there as long as there is something in them, as in S3."""

    protocol = SCHEME
    cachable = False
    store: CountingStore

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        self.store.note("head", path)
        if path in self.store.objects:
            return self._describe(path)
        if any(name.startswith(f"{path}/") for name in list(self.store.objects)):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(errno.ENOENT, "no such object", path)

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        below = {}
        for name in list(self.store.objects):
            if name.startswith(f"{path}/"):
                first, slash, _ = name.removeprefix(f"{path}/").partition("/")
                folder = {"name": f"{path}/{first}", "size": 0, "type": "directory"}
                below[first] = folder if slash else self._describe(name)
        self.store.note("list", path, num_requests=_count_pages(below))
        if not below:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        return [below[name] if detail else below[name]["name"] for name in sorted(below)]

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **kwargs):
        path = self._strip_protocol(path)
        names = sorted(name for name in list(self.store.objects) if name == path or name.startswith(f"{path}/"))
        self.store.note("list", path, num_requests=_count_pages(names))
        return {name: self._describe(name) for name in names} if detail else names

    def cat_file(self, path, start=None, end=None, **kwargs):
        path = self._strip_protocol(path)
        content = self._read(path, start or 0, end)
        self.store.note("get", path, len(content))
        return content

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        path = self._strip_protocol(path)
        self.store.note("put", path, len(value))
        if mode == "create" and path in self.store.objects:
            raise FileExistsError(errno.EEXIST, "it is there", path)
        self.store.put(path, bytes(value))

    def put_file(self, lpath, rpath, **kwargs):
        with open(lpath, "rb") as stream:
            self.pipe_file(rpath, stream.read())

    def rm(self, path, recursive=False, maxdepth=None):
        path = self._strip_protocol(path)
        self.store.note("delete", path)
        for name in list(self.store.objects):
            if name == path or (recursive and name.startswith(f"{path}/")):
                del self.store.objects[name]

    def _open(self, path, mode="rb", **kwargs):
        return _Written(self, path) if "w" in mode else io.BytesIO(self.cat_file(path))

    def _read(self, path, start, end):
        if path not in self.store.objects:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        found = self.store.objects[path]
        stop = found.size_bytes if end is None else min(end, found.size_bytes)
        return bytes(max(0, stop - start)) if found.content is None else found.content[start:stop]

    def _describe(self, path):
        found = self.store.objects[path]
        return {
            "name": path,
            "size": found.size_bytes,
            "type": "file",
            "ETag": found.etag,
            "LastModified": datetime(2026, 1, 1, tzinfo=timezone.utc),
        }


class _Written(io.BytesIO):
    """A stream into a new object."""

    def __init__(self, filesystem, path):
        super().__init__()
        self._target = filesystem, path

    def close(self):
        if not self.closed:
            filesystem, path = self._target
            filesystem.pipe_file(path, self.getvalue())
        super().close()


def _count_pages(names):
    return max(1, -(-len(names) // NAMES_OF_A_PAGE))


def open_store():
    """A new, empty store behind `counted://`, in the place of the one before."""
    fsspec.register_implementation(SCHEME, _FileSystem, clobber=True)
    _FileSystem.store = CountingStore()
    return _FileSystem.store
