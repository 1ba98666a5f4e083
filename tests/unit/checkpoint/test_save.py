"""A save that fails on one process fails at once, and alike, on all of them."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kftrain import attempts, storage
from kftrain.checkpoint import commit
from kftrain.checkpoint.save import CheckpointWriter, Identity
from kftrain.contracts import RunPaths
from kftrain.errors import DataError, error_to_dict
from kftrain.parallel.world import World

TIMEOUT_SECONDS = 60.0
"""Of the collectives: what the other process used to wait for."""


def driver_error():
    from botocore.exceptions import EndpointConnectionError

    return EndpointConnectionError(endpoint_url="https://s3")


FAILURES = {
    "bug at the commit": (0, "commit", lambda: ValueError("NaN is no JSON"), ("AssertionError", 1)),
    "driver at the commit": (0, "commit", driver_error, ("RetryableError", 138)),
    "disk at the commit": (0, "commit", lambda: OSError("no space left"), ("RetryableError", 138)),
    "ours at the commit": (0, "commit", lambda: DataError("of a kind of its own"), ("DataError", 11)),
    "bug at the digests": (1, "entry_of", lambda: ValueError("a bug"), ("AssertionError", 1)),
    "driver at the digests": (1, "entry_of", driver_error, ("RetryableError", 138)),
    "nothing": (0, "", ValueError, ("", 0)),
}
"""What happens -> which process, the function of `commit` that raises, what it raises, what all processes raise."""


def run(rank, folder):
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timeout)
    groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
    world = World(rank, 2, torch.device("cpu"), *groups)
    writer = CheckpointWriter(RunPaths(f"{folder}/runs/r"), world, Identity(1, "d", "t", {}), 9, 0)
    seen = {}
    for step, (name, (failing_rank, effect, error, _)) in enumerate(FAILURES.items(), start=1):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing_rank and effect:
                patch.setattr(commit, effect, raises(error()))
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
        writer.save({"model": {"weight": torch.ones(10)}}, [{"step": step}], step, 40)
        writer.wait()
    except Exception as error:  # noqa: BLE001 - what is raised is what is tested
        seen = error_to_dict(error)
    return [seen["kind"], seen["exit_code"], time.monotonic() - start]


def raises(error):
    def effect(*arguments):
        raise error

    return effect


def test_all_processes_raise_the_same_at_once(tmp_path):
    paths = RunPaths(f"{tmp_path}/runs/r")
    attempts.claim(paths, 0, 2)
    mp.spawn(run, (str(tmp_path),), nprocs=2)
    expected = {name: list(raised) for name, (_, _, _, raised) in FAILURES.items()}
    for rank in (0, 1):
        seen = storage.read_json(f"{tmp_path}/{rank}.json")
        assert {name: [kind, code] for name, (kind, code, _) in seen.items()} == expected
        assert max(seconds for _, _, seconds in seen.values()) < TIMEOUT_SECONDS / 2
    assert [name.step for name in commit.committed(paths)] == [len(FAILURES)]
