"""Every call of an object store ends, whatever the server does, and says that the storage is away."""

import os
import time

import pytest
import s3fs
from helpers.bad_server import BODY, BadServer

from kftrain import outages, remote, storage
from kftrain.errors import RetryableError

SHORT = remote.Deadline(base_seconds=0.4, hurried_seconds=0.4, bytes_per_second=float(1 << 30))
ENDED_SECONDS = 60.0
"""Far more than the deadlines of one call, far less than a driver's own patience."""

URI = "s3://bucket/a/b"


@pytest.fixture(scope="module")
def server():
    """One for all tests: it costs a second to make a client."""
    running = BadServer()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        with outages.patience(0):
            storage.exists(URI)  # reads botocore's models, which takes longer than a short deadline
        yield running
    running.close()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def server_of(server, monkeypatch):
    monkeypatch.setattr(outages, "_patience", outages.Patience())
    monkeypatch.setattr(remote, "deadline", SHORT)

    def planned(**plan):
        server.plan = {"HEAD": "answer", **plan}
        return server

    return planned


def new_folder(uri):
    with storage.new_folder(uri) as folder:
        (folder / "file").write_bytes(b"x" * 5000)


def stream(uri):
    with storage.open_read(uri) as opened:
        opened.read()


READS = {
    "read_bytes": storage.read_bytes,
    "sha256_file": storage.sha256_file,
    "open_read": stream,
    "read_ranges": lambda uri: storage.read_ranges(uri, [0, 5000], [10, 5010]),
}
SILENT = {
    **READS,
    "size_bytes": storage.size_bytes,
    "exists": storage.exists,
    "list_names": storage.list_names,
    "find": storage.find,
    "publish": lambda uri: storage.publish(uri, b"x" * 5000),
    "create": lambda uri: storage.create(uri, b"x" * 5000),
    "remove": storage.remove,
    "new_folder": new_folder,
}


@pytest.mark.parametrize("name", SILENT)
def test_a_server_that_accepts_and_never_answers_is_an_outage(server_of, name):
    server_of().plan["HEAD"] = "silent" if name in ("size_bytes", "exists") else "answer"
    began = time.monotonic()
    with (
        outages.patience(0),
        pytest.raises(RetryableError, match=r"cannot be reached: TimeoutError: .* no answer within"),
    ):
        SILENT[name](URI)
    assert time.monotonic() - began < ENDED_SECONDS


@pytest.mark.parametrize("what", ["drip", "stall", "cut"])
@pytest.mark.parametrize("name", READS)
def test_a_server_that_drips_or_stops_in_the_middle_is_an_outage(server_of, name, what):
    server_of(GET=what)
    began = time.monotonic()
    with outages.patience(0), pytest.raises(RetryableError, match="storage cannot be reached"):
        READS[name](URI)
    assert time.monotonic() - began < ENDED_SECONDS


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_server_that_answers_with_an_error_is_an_outage(server_of, status):
    server_of(GET=status, PUT=status)
    for work in (storage.read_bytes, lambda uri: storage.publish(uri, b"x")):
        with outages.patience(0), pytest.raises(RetryableError):
            work(URI)


def test_a_stream_into_a_store_that_never_answers_ends(server_of):
    server_of()
    began = time.monotonic()
    with pytest.raises(TimeoutError) as caught, storage.open_write(URI) as opened:
        opened.write(b"x" * 5000)
    assert storage.is_outage(caught.value)
    assert time.monotonic() - began < ENDED_SECONDS


@pytest.mark.parametrize("root", ["folder", "memory"])
def test_a_stream_appears_when_it_is_whole_and_goes_when_it_is_not(tmp_path, root):
    uri = f"{tmp_path}/x" if root == "folder" else f"memory://{tmp_path.name}-{os.getpid()}/x"
    with storage.open_write(uri) as opened:
        opened.write(b"1" * 10)
        opened.write(b"2" * 10)
    assert storage.read_bytes(uri) == b"1" * 10 + b"2" * 10
    with pytest.raises(KeyError), storage.open_write(uri + "y") as opened:
        opened.write(b"1" * 10)
        raise KeyError
    assert not storage.exists(uri + "y")


def test_fault_12_a_read_that_never_returns_names_its_object(server_of):
    server_of(GET="stall")
    with outages.patience(0), pytest.raises(RetryableError) as caught:
        storage.read_ranges("s3://bucket/shards/train-00003.tar", [0], [9000])
    assert "s3://bucket/shards/train-00003.tar" in caught.value.line


def test_fault_16_a_stream_goes_on_where_it_was_when_the_store_is_back(server_of, monkeypatch):
    """Reads in pieces; the server fails, drips and stops between them."""
    server = server_of(GET="answer")
    monkeypatch.setattr(remote, "READ_BYTES", 4096)
    troubles = iter(["answer", 503, "answer", "stall", "cut", "answer", 500])
    read_range = remote.RemotePath.read_range

    def troubled(self, start, stop):
        server.plan["GET"] = next(troubles, "answer")
        assert read_range(self, start, stop)[:1] == BODY[:1]  # this server knows no ranges
        return BODY[start:stop]

    monkeypatch.setattr(remote.RemotePath, "read_range", troubled)
    monkeypatch.setattr(outages, "FIRST_DELAY_SECONDS", 0.01)
    with storage.open_read(URI) as opened:
        assert opened.read() == BODY
    assert next(troubles, None) is None


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(tmp_path, monkeypatch):
    uri = f"memory://{tmp_path.name}-{os.getpid()}/x"
    storage.publish(uri, b"1" * 10_000)
    monkeypatch.setattr(remote, "READ_BYTES", 4096)
    with storage.open_read(uri) as opened:
        assert opened.read(10) == b"1" * 10
        storage.publish(uri, b"2" * 10_000)
        with pytest.raises(OSError, match="replaced while it was read") as caught:
            opened.read()
    assert not storage.is_outage(caught.value)


def test_the_deadline_follows_from_the_bytes():
    assert remote.Deadline().seconds(0) < remote.Deadline().seconds(1 << 30)
    usual = remote.Deadline().seconds(0)
    with outages.patience(0):
        assert remote.Deadline().seconds(0) < usual
