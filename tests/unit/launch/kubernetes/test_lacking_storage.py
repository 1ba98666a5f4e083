"""A job that ends because storage is full or away is as retryable on a cluster as it is on a laptop."""

import pytest
from helpers.launching import JOB, WORKERS, wait_until

from kftrain.core import storage
from kftrain.core.outages import UNREACHABLE
from kftrain.errors import DataError, FailureClass, LaunchError, RetryableError, StorageError
from kftrain.launch.kubernetes.diagnosis import JobFailedError, diagnose
from kftrain.launch.kubernetes.observation import Pod
from kftrain.run.error import ErrorDocument

FULL = StorageError("no space left on the device", where="/runs/r", fix="make room")
LOST = RetryableError("lost contact with another process")


def fail_once(one, namespace, code, message=""):
    """An attempt of which both workers end with `code`; the operator replaces them."""
    with namespace.changed:
        for name in WORKERS if namespace.jobs() else ():
            namespace.end_pod(name, code, message=message)
            namespace.recreate(name)
    one.settle(namespace)


def fail_until_spent(one, namespace, code):
    for _ in range(2):
        fail_once(one, namespace, code)


def test_attempts_that_are_used_up_for_a_full_disk_may_be_made_later(training, namespace):
    storage.publish_json(training.paths.error, FULL.to_dict())
    fail_until_spent(training, namespace, StorageError.exit_code)
    with pytest.raises(StorageError, match=r"2 attempts in a row .*, at last: /runs/r: no space left") as caught:
        training.finish()
    failure, error = (storage.read_json(uri) for uri in (training.paths.failure, training.paths.error))
    assert (caught.value.exit_code, failure["exit_code"], error["exit_code"]) == (138, 138, 138)
    assert failure["failure_class"] == error["failure_class"] == FailureClass.STORAGE.value
    assert error["line"] == caught.value.line


def test_attempts_whose_error_could_not_be_written_lacked_storage(training, namespace):
    fail_until_spent(training, namespace, StorageError.exit_code)
    with pytest.raises(StorageError):
        training.finish()
    assert storage.read_json(training.paths.failure)["failure_class"] == "storage"


@pytest.mark.parametrize(("error", "code"), [(LOST, 138), (None, 139)])
def test_any_other_end_of_the_attempts_is_permanent(error, code, training, namespace):
    if error is not None:
        storage.publish_json(training.paths.error, error.to_dict())
    fail_until_spent(training, namespace, code)
    with pytest.raises(LaunchError, match="2 attempts in a row"):
        training.finish()
    assert storage.read_json(training.paths.failure)["exit_code"] == 13


def test_a_start_that_takes_too_long_because_workers_cannot_reach_storage_may_be_made_later(launch, namespace, clock):
    """The launcher itself reaches it. Such attempts do not count: what ends the job is the limit of the start."""
    one = launch(start_timeout_seconds=60)
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    message = f"kftrain exit code 138 (StorageAwayError): {UNREACHABLE} for 60 s: ConnectionError: refused"
    while one.is_running:
        fail_once(one, namespace, StorageError.exit_code, message)
        clock.sleep(20.0)
    with pytest.raises(StorageError, match=f"Rendezvous for longer than .*, at last: .*{UNREACHABLE}") as caught:
        one.finish()
    failure = storage.read_json(one.paths.failure)
    assert (caught.value.exit_code, failure["exit_code"], failure["failure_class"]) == (138, 138, "storage")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(FULL, StorageError), (LOST, LaunchError), (DataError("x"), LaunchError), (None, StorageError)],
)
def test_what_a_given_up_job_is_raised_as(error, kind):
    pods = [Pod("w-0", "u", 0, exit_code=error.exit_code if error else 138)]
    found = diagnose("train", error and ErrorDocument.of(error), pods, {})
    failed = JobFailedError("spent", found.failure_class, where="job x", last_summary=found)
    assert type(failed.error) is kind
    assert type(JobFailedError("never began", FailureClass.STORAGE, where="job x").error) is LaunchError


def test_a_job_that_the_operator_ended_for_lack_of_storage_is_tried_again_and_stays_retryable(training, namespace):
    """Nobody could write the error: what the launcher leaves in its place says the same."""
    with namespace.changed:
        for name in WORKERS:
            namespace.end_pod(name, StorageError.exit_code)
        namespace.condition(JOB, "Failed")
    assert training.finish() == StorageError.exit_code
    left = ErrorDocument.salvage(storage.read_json(training.paths.error)).to_error()
    assert isinstance(left, StorageError)
