"""Every call of an object store ends, whatever the server does, and says that the storage is away."""

import os
import signal
import subprocess
import sys
import time

import click
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from helpers.fakes import counting_store
from helpers.fakes.bad_server import BODY, BadServer

from kftrain import cli
from kftrain.core import outages, remote, storage
from kftrain.errors import RetryableError

SHORT = remote.Deadline(base_seconds=0.4, hurried_seconds=0.4, bytes_per_second=float(1 << 30))
ENDED_SECONDS = 120.0
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
        with outages.retry_for(0):
            storage.exists(URI)  # reads botocore's models, which takes longer than a short deadline
        yield running
    running.close()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def server_of(server, monkeypatch):
    monkeypatch.setattr(outages, "_retry_policy", outages.OutagePolicy())
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
    "read_range": lambda uri: storage.read_range(uri, 5000, 5010),
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
        outages.retry_for(0),
        pytest.raises(RetryableError, match=r"cannot be reached.*: TimeoutError: .* no answer within"),
    ):
        SILENT[name](URI)
    assert time.monotonic() - began < ENDED_SECONDS


@pytest.mark.parametrize("what", ["drip", "stall", "cut"])
@pytest.mark.parametrize("name", READS)
def test_a_server_that_drips_or_stops_in_the_middle_is_an_outage(server_of, name, what):
    server_of(GET=what)
    began = time.monotonic()
    with outages.retry_for(0), pytest.raises(RetryableError, match="storage cannot be reached"):
        READS[name](URI)
    assert time.monotonic() - began < ENDED_SECONDS


@pytest.mark.parametrize("name", [*READS, "create"])
def test_less_than_an_object_has_is_an_outage_and_not_its_content(server_of, monkeypatch, name):
    monkeypatch.setattr(server_of(GET="short", PUT=412), "objects", {"/bucket/a/b": BODY})
    work = READS.get(name, lambda uri: storage.create(uri, BODY))
    with outages.retry_for(0), pytest.raises(RetryableError, match="bytes came instead of"):
        work(URI)


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_server_that_answers_with_an_error_is_an_outage(server_of, status):
    server_of(GET=status, PUT=status)
    for work in (storage.read_bytes, lambda uri: storage.publish(uri, b"x")):
        with outages.retry_for(0), pytest.raises(RetryableError):
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
    with outages.retry_for(0), pytest.raises(RetryableError) as caught:
        storage.read_range("s3://bucket/shards/train-00003.tar", 0, 9000)
    assert "s3://bucket/shards/train-00003.tar" in caught.value.line


def test_fault_16_a_stream_goes_on_where_it_was_when_the_store_is_back(server_of, monkeypatch):
    """Reads in pieces; the server fails, drips and stops between them."""
    server = server_of(GET="answer")
    monkeypatch.setattr(remote, "READ_BYTES", 4096)
    troubles = iter(["answer", 503, "answer", "stall", "cut", "answer", 500, "page", "short", "whole"])
    server.plan["GET"] = lambda: next(troubles, "answer")
    monkeypatch.setattr(server, "objects", {"/bucket/a/b": BODY})
    monkeypatch.setattr(outages, "FIRST_DELAY_SECONDS", 0.01)
    with storage.open_read(URI) as opened:
        assert opened.read() == BODY
    assert next(troubles, None) is None


STOPPED = """
import sys, threading
from kftrain.core import remote, storage
from kftrain.process import stage_lifetime as lifetime
remote.deadline = remote.Deadline(600.0, 600.0, 1e9)
with lifetime.raise_on_signals():
    print("up", flush=True)
    storage.publish("s3://bucket/x", b"x")
"""


def test_fault_32_whoever_is_told_to_stop_is_not_held_by_a_call_that_hangs(server_of):
    """A step of a pipeline has half a minute between SIGTERM and SIGKILL; the call itself has ten minutes here."""
    server = server_of()
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    before = time.monotonic()
    while not any(method == "PUT" for method, _ in server.requests[-1:]) and time.monotonic() - before < ENDED_SECONDS:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=ENDED_SECONDS)  # far less than the call itself has
    assert b"stopped by a signal" in said and process.returncode != 0


def test_fault_66_an_upload_that_is_interrupted_is_made_whole_or_not_believed(tmp_path, monkeypatch):
    """Two of six files arrive, then the store is away: another try brings all; given up, none is believed."""
    put_file, troubles = MemoryFileSystem.put_file, []

    def troubled(self, local, remote_path, **options):
        if remote_path.endswith("2") and troubles:
            raise troubles.pop()
        return put_file(self, local, remote_path, **options)

    def upload(uri):
        with storage.new_folder(uri) as folder:
            for number in range(6):
                (folder / str(number)).write_bytes(bytes([number]) * 100)
        storage.publish(storage.join(uri, "manifest.json"), "{}")

    monkeypatch.setattr(MemoryFileSystem, "put_file", troubled)
    monkeypatch.setattr(outages, "FIRST_DELAY_SECONDS", 0.01)
    root = f"memory://{tmp_path.name}-{os.getpid()}"
    troubles[:] = [ConnectionResetError(104, "reset")] * 2
    upload(f"{root}/whole")
    assert [storage.read_bytes(f"{root}/whole/{n}") for n in range(6)] == [bytes([n]) * 100 for n in range(6)]
    troubles[:] = [ConnectionResetError(104, "reset")]
    with outages.retry_for(0), pytest.raises(RetryableError):
        upload(f"{root}/half")
    assert storage.exists(f"{root}/half/1") and not storage.exists(f"{root}/half/manifest.json")


def test_a_large_object_is_read_in_large_requests(monkeypatch):
    content, asked, original = os.urandom(40_000), [], MemoryFileSystem.cat_file

    def cat_file(self, path, start=None, end=None, **options):
        asked.append((start, end))
        return original(self, path, start=start, end=end, **options)

    monkeypatch.setattr(remote, "READ_BYTES", 16_384)
    storage.publish("memory://large/object", content)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    assert storage.read_bytes("memory://large/object") == content
    assert asked == [(0, 16_384), (16_384, 32_768), (32_768, 40_000)]


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


@pytest.mark.parametrize(("command", "waits"), [("checkpoints", False), ("models", False), ("evaluate", True)])
def test_a_command_that_a_person_waits_for_does_not_ride_an_outage_out(monkeypatch, command, waits):
    seen = []
    found = click.Command(command, callback=lambda: seen.append(outages.is_hurried()))
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: found)
    with pytest.raises(SystemExit):
        cli.main([command])
    assert seen == [not waits] and not outages.is_hurried()


def test_a_process_that_others_wait_for_gives_up_before_they_do(monkeypatch):
    policy = outages.OutagePolicy()
    monkeypatch.setattr(outages, "_retry_policy", policy)
    outages.limit(5.0)
    outages.limit(50.0)
    assert policy.answered_seconds == 5.0


def test_a_listing_has_more_time_than_a_call_however_many_objects_there_are(monkeypatch):
    store = counting_store.open_store()
    store.put(store.uri("a", "b"), b"x")
    monkeypatch.setattr(remote, "deadline", remote.Deadline(0.3, 0.3))
    for name in ("find", "info"):
        real = getattr(counting_store._FileSystem, name)
        monkeypatch.setattr(
            counting_store._FileSystem, name, lambda *a, real=real, **k: time.sleep(0.9) or real(*a, **k)
        )
    assert list(storage.find(store.uri("a"))) == [store.uri("a", "b")]
    with outages.retry_for(0), pytest.raises(RetryableError, match="no answer within"):
        storage.size_bytes(store.uri("a", "b"))


def test_the_deadline_follows_from_the_bytes():
    assert remote.Deadline().seconds(0) < remote.Deadline().seconds(1 << 30)
    usual = remote.Deadline().seconds(0)
    with outages.retry_for(0):
        assert remote.Deadline().seconds(0) < usual
