"""Ranges of objects in S3 by obstore: as s3fs would read them, with its credentials, and by s3fs where it cannot."""

import os
import sys
import time

import pytest
import s3fs
from helpers.fakes.bad_server import BODY, BadServer

from kftrain.core import outages, remote, s3_ranges, storage

URI = "s3://bucket/some/k%20ey+é.tar"
PATH = "/bucket/some/k%2520ey%2B%C3%A9.tar"


@pytest.fixture
def server(monkeypatch):
    running = BadServer(GET="answer", LIST="answer")
    running.objects = {PATH: BODY}
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(outages, "_retry_policy", outages.OutagePolicy())
    monkeypatch.setattr(s3_ranges, "_rests_until", 0.0)
    yield running
    running.close()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def by_s3fs(monkeypatch):
    """The ranges that s3fs reads."""
    ranges, read = [], s3fs.S3FileSystem._cat_file

    async def counting(self, path, start=None, end=None, **options):
        ranges.append((start, end))
        return await read(self, path, start=start, end=end, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", counting)
    return ranges


def test_obstore_reads_the_same_object_with_the_same_credentials(server, by_s3fs, monkeypatch, tmp_path):
    """Also those of a file, which obstore does not read."""
    lines = ["[default]", "aws_access_key_id=of-a-file", "aws_secret_access_key=secret", "aws_session_token=token"]
    (tmp_path / "credentials").write_text("\n".join(lines))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert storage.read_range(URI, 1000, 5000) == BODY[1000:5000] and not by_s3fs
    assert len(server.requests) == 1, "and asks for nothing else"
    (header,) = [line for line in server.headers[-1].splitlines() if line.lower().startswith(b"authorization:")]
    assert b"Credential=of-a-file/" in header and b"/us-east-1/s3/" in header
    assert b"x-amz-security-token: token" in server.headers[-1].lower()
    with s3fs.S3FileSystem().open(URI) as stream:
        assert stream.read()[1000:5000] == BODY[1000:5000]


@pytest.mark.parametrize("what", [403, "cut", "page", "whole"])
def test_what_goes_wrong_is_for_s3fs_and_its_turn_lasts_a_while(server, by_s3fs, monkeypatch, what):
    answers = iter([what])
    server.plan["GET"] = lambda: next(answers, "answer")
    for _ in range(2):
        with outages.retry_for(0):
            assert storage.read_range(URI, 0, 5000) == BODY[:5000]
    assert by_s3fs == [(0, 5000)] * 2
    monkeypatch.setattr(s3_ranges, "_rests_until", 0.0)
    assert storage.read_range(URI, 0, 5000) == BODY[:5000] and len(by_s3fs) == 2


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_store_that_is_away_is_asked_again_after_a_pause(server, by_s3fs, status):
    server.plan["GET"] = status
    with outages.retry_for(0), pytest.raises(outages.StorageAwayError, match=str(status)):
        storage.read_range(URI, 0, 5000)
    assert len(server.requests) == 1 and not by_s3fs
    server.plan["GET"] = "answer"
    assert storage.read_range(URI, 0, 5000) == BODY[:5000]


def test_what_does_not_answer_has_no_next_turn(server, by_s3fs, monkeypatch):
    storage.read_range(URI, 0, 10)
    monkeypatch.setattr(remote, "deadline", remote.Deadline(1.0, 1.0, 1e9))
    answers = iter(["silent"])
    server.plan["GET"] = lambda: next(answers, "answer")
    assert storage.read_range(URI, 0, 5000) == BODY[:5000] and by_s3fs == [(0, 5000)]


def wait_for(pid):
    """The exit code of a child; None where it has none within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (waited := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(waited[1])
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nobody forks")
def test_a_forked_process_reads_by_s3fs(server, by_s3fs, monkeypatch):
    """The workers of torch's DataLoader are forked from a process that may have read."""
    monkeypatch.setattr(remote, "deadline", remote.Deadline(10.0, 10.0, 1e9))
    assert storage.read_range(URI, 0, 10) == BODY[:10] and not by_s3fs
    if not (pid := os.fork()):
        code = 1
        try:
            with outages.retry_for(0):
                s3_ranges.leave_to_s3fs(0)  # as an error of s3fs would: that ends nothing
                code = int(storage.read_range(URI, 10, 20) != BODY[10:20] or by_s3fs != [(10, 20)])
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert wait_for(pid) == 0
    assert storage.read_range(URI, 0, 10) == BODY[:10] and not by_s3fs, "the parent goes on"


def test_an_object_that_is_missing_costs_nobody_a_turn(server, by_s3fs):
    with pytest.raises(FileNotFoundError):
        storage.read_range("s3://bucket/missing", 0, 10)
    assert storage.read_range(URI, 0, 10) == BODY[:10] and by_s3fs == [(0, 10)]


def test_a_server_that_never_answers_is_an_outage(server, monkeypatch):
    storage.read_range(URI, 0, 10)
    monkeypatch.setattr(remote, "deadline", remote.Deadline(0.4, 0.4, 1e9))
    server.plan["GET"] = "silent"
    with outages.retry_for(0), pytest.raises(outages.StorageError, match="no answer within"):
        storage.read_range(URI, 0, 10)


@pytest.mark.parametrize(
    "options",
    [
        {"requester_pays": True},
        {"version_aware": True},
        {"client_kwargs": {"verify": "/some/bundle"}},
        {"config_kwargs": {"proxies": {"http": "http://127.0.0.1:9"}}},
        {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256"}},
        {"default_block_size": 1 << 20},
    ],
)
def test_what_obstore_does_not_know_is_for_s3fs(options):
    assert s3_ranges.is_plain_s3(s3fs.S3FileSystem(anon=True, use_listings_cache=False))
    assert s3_ranges.is_plain_s3(s3fs.S3FileSystem(key="a", secret="b", token="c", endpoint_url="http://127.0.0.1:9"))
    assert not s3_ranges.is_plain_s3(s3fs.S3FileSystem(anon=True, **options))


def test_certificates_of_ones_own_are_for_s3fs_unless_both_know_them(monkeypatch):
    filesystem = s3fs.S3FileSystem(anon=True)
    monkeypatch.setenv("AWS_CA_BUNDLE", "/ca.crt")
    assert not s3_ranges.is_plain_s3(filesystem)
    monkeypatch.setenv("SSL_CERT_FILE", "/ca.crt")
    assert s3_ranges.is_plain_s3(filesystem)


def test_without_obstore_s3fs_reads(server, by_s3fs, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    assert storage.read_range(URI, 1, 9) == BODY[1:9] and by_s3fs == [(1, 9)]
