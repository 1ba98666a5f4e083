"""The groups in which processes agree, with two real processes."""

import os
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time
from kftrain.parallel.world import join_world

case, rank = sys.argv[1], int(os.environ["RANK"])
with join_world(timeout_seconds=3.0) as world:
    if rank == 1 and case == "dies":
        os._exit(7)
    time.sleep(8.0 * rank)
    gather = world.gather if case == "quick" else world.gather_slowly
    start = time.monotonic()
    try:
        print(gather(rank * 10), flush=True)
    except RuntimeError:
        print("lost before the peer came" if time.monotonic() - start < 7.0 else "lost late", flush=True)
"""


def outputs_of(case):
    """What each of two processes prints."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, case],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    return [process.communicate(timeout=100)[0].strip() for process in processes]


def test_what_takes_long_on_one_process_is_waited_for():
    """Hashing a checkpoint's largest file may take longer than a collective operation of the training may."""
    assert outputs_of("slow") == ["[0, 10]", "[0, 10]"]


def test_training_does_not_wait_longer_than_its_timeout():
    assert outputs_of("quick")[0] == "lost before the peer came"


def test_a_peer_that_dies_is_noticed_at_once_also_by_who_is_patient():
    assert outputs_of("dies") == ["lost before the peer came", ""]
