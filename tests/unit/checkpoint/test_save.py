"""A save that fails on one process fails at once, and alike, on all of them."""

import time

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import checkpoints

from kftrain.core import storage
from kftrain.errors import DataError, error_to_dict
from kftrain.run import attempts, commit
from kftrain.run.paths import RunPaths


def driver_error():
    from botocore.exceptions import EndpointConnectionError

    return EndpointConnectionError(endpoint_url="https://s3")


class UnpicklableError(OSError):
    """As some drivers' errors are."""

    def __init__(self):
        super().__init__("no pickle")
        self.connection = lambda: None


FAILURES = {
    "bug at the commit": (0, "commit", lambda: ValueError("NaN is no JSON"), ("AssertionError", 1)),
    "driver at the commit": (0, "commit", driver_error, ("StorageError", 138)),
    "disk at the commit": (0, "commit", lambda: OSError("no space left"), ("StorageError", 138)),
    "ours at the commit": (0, "commit", lambda: DataError("of a kind of its own"), ("DataError", 11)),
    "bug while writing": (1, "open_write", lambda: ValueError("a bug"), ("AssertionError", 1)),
    "driver while writing": (1, "open_write", driver_error, ("StorageAwayError", 138)),
    "what no pickle holds, while writing": (1, "open_write", UnpicklableError, ("StorageError", 138)),
    "disk while writing": (0, "open_write", lambda: OSError(28, "no space left"), ("StorageError", 138)),
    "nothing": (0, "", ValueError, ("", 0)),
}
"""What happens -> which process, the function that raises, what it raises, what all processes raise."""

MODULES = {"commit": commit, "open_write": storage}


def run(rank, folder):
    world = checkpoints.one_of_two(folder, rank)
    writer = checkpoints.writer_of(RunPaths(f"{folder}/runs/r"), world)
    writer.bad_samples = {31, 30}
    seen = {}
    for step, (name, (failing_rank, effect, error, _)) in enumerate(FAILURES.items(), start=1):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing_rank and effect:
                patch.setattr(MODULES[effect], effect, raises(error()))
            seen[name] = attempt_to_save(writer, step)
        dist.barrier(group=world.control)
    writer.close()
    storage.publish_json(f"{folder}/{rank}.json", seen)
    dist.destroy_process_group()


def attempt_to_save(writer, step):
    """Kind and exit code of what is raised, and after how long, in seconds."""
    start = time.monotonic()
    seen = {"kind": "", "exit_code": 0}
    try:
        checkpoints.save(writer, step)
    except Exception as error:  # noqa: BLE001 - what is raised is what is tested
        seen = error_to_dict(error)
    return [seen["kind"], seen["exit_code"], time.monotonic() - start]


def raises(error):
    def effect(*arguments):
        raise error

    return effect


def test_all_processes_raise_the_same_at_once(tmp_path):
    paths = RunPaths(f"{tmp_path}/runs/r")
    attempts.claim_run(paths, 0, 2)
    mp.spawn(run, (str(tmp_path),), nprocs=2)
    expected = {name: list(raised) for name, (_, _, _, raised) in FAILURES.items()}
    for rank in (0, 1):
        seen = storage.read_json(f"{tmp_path}/{rank}.json")
        assert {name: [kind, code] for name, (kind, code, _) in seen.items()} == expected
        assert max(seconds for _, _, seconds in seen.values()) < checkpoints.TIMEOUT.total_seconds() / 2
    assert [name.step for name in commit.list_committed(paths)] == [len(FAILURES)]
    last = storage.join(paths.checkpoints, str(commit.list_committed(paths)[0]))
    assert commit.read_checkpoint_manifest(last)[0].bad_samples == (30, 31), "what was left out"
