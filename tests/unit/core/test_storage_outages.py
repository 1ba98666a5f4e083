"""How long storage that is away is waited for, by a clock that passes while somebody sleeps."""

import errno

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ClientError, FlexibleChecksumError, NoCredentialsError, ReadTimeoutError
from s3fs.errors import translate_boto_error

from kftrain.core import outages, traffic
from kftrain.errors import RetryableError
from kftrain.run.best_effort import best_effort, retryable

URI = "s3://bucket/run/x"
DOWN = ConnectionRefusedError(errno.ECONNREFUSED, "refused")


def answer(code, status):
    response = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(response, "GetObject"))


FORBIDDEN = answer("AccessDenied", 403)
EXPIRED = answer("ExpiredToken", 400)
EXPIRED_HEAD = answer("400", 400)


class Store:
    """Answers "ok" or what the script says: an exception, and until when (seconds) it is raised."""

    def __init__(self):
        self.now = 0.0
        self.said = []
        self.calls = 0
        self.trouble = None
        self.until = 0.0
        self.retry_policy = outages.OutagePolicy(self.said.append, lambda: self.now, self.sleep)

    def sleep(self, seconds):
        self.now += max(seconds, 0.001)

    def away(self, error, seconds):
        self.trouble, self.until = error, self.now + seconds
        return self

    def call(self, kind="read", uri=URI):
        return self.retry_policy.call(uri, kind, self.work)

    def work(self):
        self.calls += 1
        if self.now < self.until:
            raise self.trouble
        return "ok"


@pytest.fixture
def store():
    return Store()


def given_up_after(store, error, kind="read"):
    began = store.now
    with pytest.raises(RetryableError) as caught:
        store.away(error, 1e9).call(kind)
    assert caught.value.exit_code == 138 and "\n" not in caught.value.line and URI in caught.value.line
    return store.now - began


def test_a_store_that_has_answered_is_ridden_out_for_ten_minutes(store):
    assert store.call() == "ok"
    traffic.take_counts()
    assert store.away(DOWN, 590).call() == "ok"
    assert traffic.take_counts() == {"retries": store.calls - 2}
    assert given_up_after(store, DOWN) == pytest.approx(600, abs=0.1)


def test_one_that_never_has_is_waited_for_a_minute(store):
    assert store.away(DOWN, 50).call() == "ok"
    fresh = Store()
    assert given_up_after(fresh, DOWN) == pytest.approx(60, abs=0.1)


def test_stores_are_told_apart_by_bucket(store):
    store.call(uri="s3://other/x")
    assert given_up_after(store, DOWN) == pytest.approx(60, abs=0.1)


def test_that_nothing_is_there_is_an_answer(store):
    with pytest.raises(FileNotFoundError):
        store.away(FileNotFoundError("none"), 1e9).call()
    assert given_up_after(store, DOWN) == pytest.approx(600, abs=0.1)


def test_an_outage_is_said_once_and_so_is_its_end(store):
    store.call()
    store.away(DOWN, 300).call()
    store.call()
    assert len(store.said) == 2, store.said
    assert "s3://bucket does not answer (ConnectionRefusedError" in store.said[0]
    assert store.said[1] == "s3://bucket answers again"


def test_what_passes_within_a_moment_is_not_said(store):
    store.away(DOWN, 0.1).call()
    assert not store.said


def test_whoever_waits_gets_an_answer_at_once(store):
    store.call()
    with outages.retry_for(0), pytest.raises(RetryableError):
        store.away(DOWN, 1e9).call()
    assert store.calls == 2 and store.now == 0


@pytest.mark.parametrize("error", [FORBIDDEN, PermissionError("no"), NoCredentialsError(), EXPIRED_HEAD])
def test_a_refusal_passes_only_where_the_same_was_allowed_before(store, error):
    with pytest.raises(type(error)):
        store.away(error, 30).call()
    assert store.now == 0
    store.until = 0
    store.call("read")
    with pytest.raises(type(error)):
        store.away(error, 30).call("write")
    assert store.away(error, 30).call("read") == "ok"
    assert given_up_after(store, error) == pytest.approx(600, abs=0.1)


def test_credentials_that_have_expired_are_an_outage_from_the_start(store):
    assert store.away(EXPIRED, 50).call() == "ok"


@pytest.mark.parametrize("error", [FileExistsError("x"), OSError(errno.ENOSPC, "full"), ValueError("x")])
def test_what_no_time_mends_is_raised_as_it_is(store, error):
    store.call()
    with pytest.raises(type(error)) as caught:
        store.away(error, 1e9).call()
    assert caught.value is error and store.calls == 2


def test_a_folder_of_this_machine_is_ridden_out_but_its_permissions_are_not(store):
    folder = "/mnt/runs/x"
    store.call(uri=folder)
    assert store.away(OSError(errno.ESTALE, "stale"), 100).call(uri=folder) == "ok"
    with pytest.raises(PermissionError):
        store.away(PermissionError("no"), 100).call(uri=folder)


class HttpError(Exception):
    """As gcsfs and azure raise them."""

    def __init__(self, code):
        self.code = code


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (answer("502", 502), True),
        (answer("SlowDown", 503), True),
        (answer("RequestTimeout", 400), True),
        (answer("InvalidArgument", 400), False),
        (answer("NoSuchKey", 404), False),
        (FORBIDDEN, False),
        (EXPIRED, True),
        (ClientPayloadError("Response payload is not completed"), True),
        (ReadTimeoutError(endpoint_url="http://x"), True),
        (FlexibleChecksumError(error_msg="Expected checksum x did not match calculated checksum: y"), True),
        (HttpError(503), True),
        (HttpError(429), True),
        (HttpError(404), False),
        (RetryableError("storage cannot be reached"), False),  # it was ridden out already
    ],
)
def test_outages_of_all_drivers_are_recognised(error, outage):
    assert outages.is_outage(error) is outage


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer("SlowDown", 503), RetryableError),
        (ReadTimeoutError(endpoint_url="http://x"), RetryableError),
        (TimeoutError("x"), RetryableError),
        (FlexibleChecksumError(error_msg="Expected checksum x did not match calculated checksum: y"), RetryableError),
        (ClientError({"Error": {"Code": "InvalidArgument"}}, "GetObject"), OSError),
        (ClientError({"Error": {"Code": "400"}}, "HeadObject"), PermissionError),
        (NoCredentialsError(), PermissionError),
    ],
)
def test_storage_fails_by_two_kinds_of_exceptions_whatever_its_driver_raises(error, kind):
    with pytest.raises(kind) as caught, outages.simplify_errors("s3://b/x"):
        raise error
    assert "s3://b/x" in str(caught.value) and type(error).__name__ in str(caught.value)
    assert not (kind is OSError and outages.is_outage(caught.value))


def test_what_comes_out_of_a_driver_is_its_own_whatever_it_is():
    """aiohttp says that its session is closed by a RuntimeError."""
    drivers = {"__name__": "aiohttp.client", "error": RuntimeError("Session is closed")}
    exec("def get():\n    raise error", drivers)
    with pytest.raises(OSError, match="RuntimeError: Session is closed"), outages.simplify_errors("s3://b/x"):
        drivers["get"]()


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("x"), OSError(errno.ENOSPC, "full"), RetryableError("x"), KeyError("a bug"), TypeError("a bug")],
)
def test_bugs_and_what_the_file_system_says_pass(error):
    with pytest.raises(type(error)) as caught, outages.simplify_errors("s3://b/x"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [answer("InvalidArgument", 400), TimeoutError("x"), ValueError("no JSON"), OSError()])
def test_storage_may_fail_where_it_is_not_needed(error, capsys):
    with best_effort("it could not be read"):
        raise error
    assert "warning: it could not be read: " in capsys.readouterr().out


@pytest.mark.parametrize("block", [best_effort("x"), retryable("x", "s3://b/x")])
def test_a_bug_in_a_block_that_reads_storage_is_not_taken_for_an_outage(block):
    with pytest.raises(AttributeError), block:
        raise AttributeError("a bug")
