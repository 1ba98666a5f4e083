import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from unittest import mock

import fsspec
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from fsspec.implementations.memory import MemoryFileSystem
from s3fs.errors import translate_boto_error

from kftrain.core import outages, storage
from kftrain.errors import ConfigError, DataError, RetryableError
from kftrain.run import attempts
from kftrain.run.paths import RunPaths


@pytest.fixture(params=["folder", "memory"])
def root(request, tmp_path):
    return str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}-{os.getpid()}"


def test_published_content_is_read_back_and_replaced_as_a_whole(root):
    uri = storage.join(root, "a", "b.json")
    storage.publish_json(uri, {"x": 1})
    storage.publish_json(uri, {"x": 2})
    assert storage.read_json(uri) == {"x": 2}
    assert storage.list_names(storage.join(root, "a")) == ["b.json"]
    assert storage.size_bytes(uri) == len(storage.read_bytes(uri))
    assert storage.sha256_file(uri) == storage.sha256_bytes(storage.read_bytes(uri))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "{", "", "\x00", b"\xff"])
@pytest.mark.parametrize("read", [storage.read_json, storage.read_json_if_exists])
def test_what_is_no_json_is_an_error_that_names_the_file(root, content, read):
    """A few kilobytes of brackets overflow the parser's stack."""
    uri = storage.join(root, "history.json")
    storage.publish(uri, content)
    with pytest.raises(DataError, match=r"history\.json: history\.json is not valid JSON"):
        read(uri)


@pytest.mark.parametrize("write", [storage.publish, storage.create])
@pytest.mark.parametrize("uri", ["/proc/x.json", "/proc/x/y.json", "/proc/self/x.json", "/dev/null/x"])
def test_a_place_that_takes_no_files_is_refused_by_name(uri, write):
    folder = uri.rsplit("/", 1)[0]
    with pytest.raises(ConfigError, match=f"^{folder}.*: the system refuses it"), outages.explain_disk_errors(""):
        write(uri, "1")


CHAINS = ["simplecache::s3://b/x", "simplecache::memory://x", "simplecache::/tmp/x", "zip://a.txt::/tmp/x.zip"]


@pytest.mark.parametrize("uri", CHAINS)
def test_a_chain_of_uris_is_refused_before_anything_is_asked(uri):
    for use in (storage.absolute, storage.read_bytes, storage.exists, storage.list_names):
        with pytest.raises(ConfigError, match=f"^{uri}.*: a chain of URIs"):
            use(uri)


def test_a_name_with_two_colons_is_no_chain(tmp_path):
    storage.publish(f"{tmp_path}/a::b", "1")
    assert storage.read_text(storage.absolute("./a::b", tmp_path)) == "1"


def test_of_many_creators_exactly_one_wins(tmp_path):
    uri = storage.join(str(tmp_path), "claim")

    def attempt(number):
        try:
            storage.create(uri, str(number))
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number in pool.map(attempt, range(64)) if number is not None]
    assert len(winners) == 1
    assert storage.read_text(uri) == str(winners[0])
    assert storage.list_names(str(tmp_path)) == ["claim"]


def test_create_refuses_what_exists(root):
    uri = storage.join(root, "x")
    storage.create(uri, "1")
    with pytest.raises(FileExistsError):
        storage.create(uri, "2")
    assert storage.read_text(uri) == "1"


def test_missing_things_are_missing(root):
    uri = storage.join(root, "none")
    assert not storage.exists(uri)
    assert storage.read_json_if_exists(uri) is None
    assert storage.list_names(uri) == []
    storage.remove(uri)
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(uri)


def test_a_new_folder_appears_as_a_whole_or_not_at_all(root):
    uri = storage.join(root, "folder")
    with pytest.raises(RuntimeError), storage.new_folder(uri) as path:
        (path / "half").write_text("x")
        raise RuntimeError
    assert not storage.exists(uri)
    with storage.new_folder(uri) as path:
        (path / "sub").mkdir()
        (path / "sub" / "whole").write_text("x")
        if storage.is_local(uri):
            assert not storage.exists(uri)
    assert storage.read_text(storage.join(uri, "sub", "whole")) == "x"


def test_a_folder_that_came_first_stays(tmp_path):
    uri = storage.join(str(tmp_path), "folder")
    with storage.new_folder(uri) as mine:
        (mine / "f").write_text("mine")
        with storage.new_folder(uri) as other:
            (other / "f").write_text("other")
    assert storage.read_text(storage.join(uri, "f")) == "other"
    assert storage.list_names(str(tmp_path)) == ["folder"]


def test_published_files_are_readable_by_others(tmp_path):
    uri = storage.join(str(tmp_path), "x")
    storage.publish(uri, "1")
    assert stat.S_IMODE(os.stat(uri).st_mode) == storage.PUBLISHED_MODE


@pytest.mark.parametrize("part", ["../x", "a/../../x", "/etc/passwd", ".."])
def test_names_may_not_leave_their_folder(part):
    with pytest.raises(ConfigError):
        storage.join("/root", part)


def test_an_unknown_scheme_names_what_to_install():
    with pytest.raises(ConfigError, match="no driver for nosuch://"):
        storage.exists("nosuch://bucket/x")


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_content(tmp_path):
    """Kills a process that replaces a file in a loop: a reader must see nothing but a whole version."""
    uri = str(tmp_path / "f.json")
    storage.publish_json(uri, [0] * 10_000)
    script = (
        "import sys; from kftrain.core import storage\n"
        "for i in range(1, 10**6):\n"
        "    storage.publish_json(sys.argv[1], [i % 10] * 10_000)\n"
        "    if i == 1: print('on', flush=True)\n"
    )
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", script, uri], stdout=subprocess.PIPE)
        process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()
        content = storage.read_json(uri)
        assert len(content) == 10_000 and len(set(content)) == 1


def answer(code, status):
    """What s3fs makes of an S3 server's error answer."""
    response = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(response, "PutObject"))


class Scripted(MemoryFileSystem):
    """A store that answers the first writes with errors; some of these writes take effect all the same."""

    protocol = "scripted"
    script: ClassVar = []

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if not self.script:
            return super().pipe_file(path, value, mode=mode, **kwargs)
        error, written = self.script.pop(0)
        if written is not None:
            super().pipe_file(path, written)
        raise error


class Time:
    """A clock that passes while somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.said = []

    def sleep(self, seconds):
        self.now += max(seconds, 0.001)

    def retry_policy(self):
        return outages.OutagePolicy(self.said.append, lambda: self.now, self.sleep)


@pytest.fixture
def time_(monkeypatch):
    fake = Time()
    monkeypatch.setattr(outages, "_retry_policy", fake.retry_policy())
    return fake


@pytest.fixture
def scripted(monkeypatch, tmp_path, time_):
    fsspec.register_implementation("scripted", Scripted, clobber=True)
    monkeypatch.setattr(Scripted, "script", [])
    return f"scripted://{tmp_path.name}/claim"


CONFLICT = answer("ConditionalRequestConflict", 409)
EXISTS = answer("PreconditionFailed", 412)
NAMED = translate_boto_error(ClientError({"Error": {"Code": "PreconditionFailed"}}, "PutObject"))
BUSY = answer("SlowDown", 503)


@pytest.mark.parametrize(
    "script",
    [
        [(EXISTS, b"theirs")],
        [(NAMED, b"theirs")],
        [(FileExistsError("of s3fs"), b"theirs")],
        [(CONFLICT, b"theirs")],
        [(CONFLICT, None), (EXISTS, b"theirs")],
        [(BUSY, b"theirs")],
        [(OSError(errno.EINVAL, "of an unknown driver"), b"theirs")],
    ],
)
def test_whoever_lost_the_race_for_an_object_is_told_so_whatever_the_store_answered(scripted, script):
    Scripted.script[:] = script
    with pytest.raises(FileExistsError):
        storage.create(scripted, "ours")
    assert not Scripted.script


@pytest.mark.parametrize(
    "script",
    [
        [(EXISTS, b"ours")],  # the first answer was lost, and the driver has repeated the write
        [(NAMED, b"ours")],
        [(FileExistsError("of s3fs"), b"ours")],
        [(TimeoutError("no answer"), b"ours")],
        [(CONFLICT, None), (CONFLICT, None)],
        [(CONFLICT, None), (EXISTS, b"ours")],  # the first write was carried out late
        [(BUSY, b"ours")],
        [(BUSY, None), (ConnectionResetError(104, "reset"), None), (EXISTS, b"ours")],
    ],
)
def test_whoever_won_the_race_for_an_object_is_told_so_whatever_the_store_answered(scripted, script):
    Scripted.script[:] = script
    storage.create(scripted, "ours")
    assert storage.read_text(scripted) == "ours" and not Scripted.script


@pytest.mark.parametrize("error", [PermissionError("no"), answer("NoSuchBucket", 404), EXISTS])
def test_a_write_that_failed_without_a_race_keeps_its_error(scripted, error):
    Scripted.script[:] = [(error, None)]
    with pytest.raises(type(error)) as caught:
        storage.create(scripted, "ours")
    assert caught.value is error and not storage.exists(scripted)


def test_a_conflict_that_does_not_end_is_not_waited_for_forever(scripted, time_):
    Scripted.script[:] = [(CONFLICT, None)] * 1000
    with pytest.raises(RetryableError, match="Conflict"):
        storage.create(scripted, "ours")
    assert time_.now == pytest.approx(outages.UNANSWERED_SECONDS, abs=0.1)


def test_two_claims_are_never_equal():
    """Whose claim it is is told by its content, also in containers that share host name, process number and clock."""
    paths = RunPaths("memory://claims-of-a-test")
    with mock.patch("time.time", return_value=1.0), mock.patch("socket.gethostname", return_value="localhost"):
        numbers = [attempts.claim_run(paths, 0, 1), attempts.claim_run(paths, 0, 1)]
    found = [storage.read_json(paths.attempt(number)) for number in numbers]
    assert numbers == [1, 2]
    assert {**found[0], "attempt": 2} != found[1]


def test_a_driver_that_would_overwrite_is_refused(tmp_path):
    class Old(MemoryFileSystem):
        protocol = "old"

        def pipe_file(self, path, value, **kwargs):
            super().pipe_file(path, value)

    fsspec.register_implementation("old", Old, clobber=True)
    uri = f"old://{tmp_path.name}/claim"
    with pytest.raises(ConfigError, match="cannot create a file exclusively"):
        storage.create(uri, "1")
    assert not storage.exists(uri)


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (TimeoutError("x"), True),
        (ConnectionResetError(104, "reset"), True),
        (BUSY, True),
        (answer("InternalError", 500), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (BlockingIOError(errno.EAGAIN, "again"), True),
        (EndpointConnectionError(endpoint_url="http://x"), True),
        (FileNotFoundError(errno.ENOENT, "none"), False),
        (PermissionError(errno.EACCES, "no"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (ValueError("x"), False),
    ],
)
def test_an_outage_is_told_from_what_will_not_pass(error, outage):
    assert storage.is_outage(error) is outage


@pytest.mark.parametrize("read", [storage.open_read, storage.read_bytes, storage.sha256_file, storage.read_json])
def test_what_is_no_regular_file_is_no_file_and_holds_up_nobody(tmp_path, read):
    """A pipe would be waited for, /dev/zero read without an end, /dev/null taken for an empty file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for uri in (f"{tmp_path}/pipe", f"file://{tmp_path}/pipe", f"{tmp_path}/zero", "/dev/null"):
        with pytest.raises(FileNotFoundError, match="not a regular file") as caught:
            read(uri)
        assert caught.value.filename == uri.removeprefix("file://")
    assert storage.read_json_if_exists(f"{tmp_path}/pipe") is None
    with pytest.raises(IsADirectoryError):
        read(str(tmp_path))
    (tmp_path / "file").write_text("1")
    (tmp_path / "link").symlink_to("file")
    assert storage.read_bytes(f"{tmp_path}/link") == b"1"


def test_what_is_opened_is_closed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")
    for uri in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match=r"regular|directory"):
            storage.open_read(str(uri))
    assert os.listdir("/proc/self/fd") == before
