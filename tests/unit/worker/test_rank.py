import errno
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError, Preempted, RetryableError, UserCodeError
from kftrain.launch.spec import ERROR_FILE_ENV
from kftrain.process.stop_request import StopRequest
from kftrain.run import attempts
from kftrain.run.error import ErrorDocument
from kftrain.run.paths import RunPaths
from kftrain.worker.error_report import classify
from kftrain.worker.node import NodeSpec
from kftrain.worker.rank import report_error
from kftrain.worker.root_cause import is_lost_peer


def test_a_full_disk_does_not_change_the_exit_code(monkeypatch, tmp_path):
    def full(uri, document):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv(ERROR_FILE_ENV, str(tmp_path / "error.json"))
    monkeypatch.setattr(storage, "create_json", full)
    assert report_error(Preempted("stopped at step 3 of 20")) == 143


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_fault_48_an_attempt_that_cannot_claim_its_run_for_a_full_disk_is_tried_again(monkeypatch, tmp_path, code):
    """The attempt before has filled the disk: there is room for nothing, also not for what says so."""
    paths = RunPaths.of(str(tmp_path), "r")
    monkeypatch.setattr(os, "link", lambda source, target: refused(code, source, target))
    with pytest.raises(OSError) as caught:
        attempts.claim_run(paths, 0, 1)
    assert report_error(caught.value) == 138
    assert classify(caught.value).line.startswith(f"{paths.attempts}/1.json: no space is left on the device")


def refused(code, source, target):
    raise OSError(code, os.strerror(code), source, None, target)


def test_user_code_that_ends_its_process_is_named(capsys):
    with pytest.raises(UserCodeError) as caught, user_code("task.loss"):
        sys.exit(0)
    assert caught.value.line.startswith("task.loss: SystemExit: 0 (") and "Traceback" in capsys.readouterr().err


def test_a_process_that_user_code_forks_dies_of_sigterm_and_this_one_only_notes_it():
    context = multiprocessing.get_context("fork")
    with StopRequest().note_sigterm() as stop:
        for seconds in (0.0, 0.5):
            child = context.Process(target=time.sleep, args=(600,), daemon=True)
            child.start()
            time.sleep(seconds)
            child.terminate()
            child.join(120)
            assert child.exitcode == -signal.SIGTERM
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


def raised_in_user_code(cause):
    try:
        with user_code("task.loss"):
            raise cause
    except UserCodeError as error:
        return error


@pytest.mark.parametrize(
    "cause",
    [
        RuntimeError("[../third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"),
        dist.DistNetworkError("failed to recv"),
        dist.DistBackendError("NCCL error"),
    ],
)
def test_a_lost_peer_is_retryable_also_inside_a_forward_pass(cause):
    assert isinstance(classify(cause), RetryableError)
    assert isinstance(classify(raised_in_user_code(cause)), RetryableError)
    assert is_lost_peer(ErrorDocument.of(classify(cause)))


@pytest.mark.parametrize(
    "message", ["could not restore the tokenizer state", "feature store has no key 7", "Broken pipe of my own"]
)
def test_a_users_own_words_are_not_taken_for_a_lost_peer(message):
    assert isinstance(classify(raised_in_user_code(RuntimeError(message))), UserCodeError)


@pytest.mark.parametrize("message", ["Broken pipe", "Connection reset by peer", "DistStore is gone", "[c10d] no"])
def test_a_broken_connection_of_ours_is_a_lost_peer(message):
    assert is_lost_peer(ErrorDocument.of(classify(RuntimeError(message))))
    assert classify(RuntimeError("could not restore the state")) is None


def test_out_of_gpu_memory_is_permanent_and_says_what_to_do():
    error = classify(raised_in_user_code(torch.OutOfMemoryError("CUDA out of memory")))
    assert isinstance(error, ConfigError)
    assert "micro_batch_size" in error.fix


def test_the_users_own_exception_stays_the_users():
    error = classify(raised_in_user_code(ValueError("my own")))
    assert isinstance(error, UserCodeError)
    assert "ValueError: my own" in error.line and "test_rank.py" in error.line


class EndpointConnectionError(Exception):
    """As an object store's driver raises it: no OSError."""


@pytest.mark.parametrize(
    "cause",
    [
        EndpointConnectionError("no answer"),
        TimeoutError("slow"),
        ConnectionResetError("gone"),
        OSError(errno.EBUSY, "Please reduce your request rate"),
        OSError(errno.ESTALE, "Stale file handle"),
    ],
)
def test_storage_that_is_away_is_worth_another_attempt_and_a_users_own_error_of_that_kind_is_not(cause):
    error = classify(cause)
    assert isinstance(error, RetryableError) and type(cause).__name__ in error.line
    assert not is_lost_peer(ErrorDocument.of(error))
    assert isinstance(classify(raised_in_user_code(cause)), UserCodeError)
    assert classify(PermissionError("no")) is None


def test_a_bug_of_ours_is_not_dressed_up():
    assert classify(KeyError("x")) is None


def test_the_first_error_of_a_node_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(ERROR_FILE_ENV, str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    assert report_error(ConfigError("first")) == 10
    assert report_error(RetryableError("second")) == 138
    document = storage.read_json(str(tmp_path / "error.json"))
    assert (document["line"], document["rank"], document["exit_code"]) == ("first", 3, 10)
    assert capsys.readouterr().err.splitlines() == ["kftrain: error: first", "kftrain: error: second"]


def test_each_rank_is_told_its_place_in_torchruns_variables():
    node = NodeSpec("train", "uri", "digest", processes=4, nodes=3, node_rank=1, address="job-worker-0")
    assert NodeSpec.from_argument(node.to_argument()) == node
    environment = node.build_rank_environment(2, node.address, 23456)
    job = environment.pop("KFTRAIN_JOB")
    assert job == replace(node, node_rank=2).build_rank_environment(0, "other", 1)["KFTRAIN_JOB"]
    others = (replace(node, run_uri="other"), replace(node, digest="other"), replace(node, task="evaluate"))
    assert job not in [other.build_rank_environment(2, "", 1)["KFTRAIN_JOB"] for other in others]
    assert environment == {
        "RANK": "6", "LOCAL_RANK": "2", "GROUP_RANK": "1", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "job-worker-0", "MASTER_PORT": "23456",
    }  # fmt: skip
