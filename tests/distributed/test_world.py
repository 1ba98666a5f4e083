"""The groups in which processes agree, with two real processes."""

import os
import subprocess
import sys

import pytest

from kftrain.process import store_socket

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time
from kftrain.parallel.world import join_world

case, folder, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])


def await_file(name, seconds=120.0):
    until = time.monotonic() + seconds
    while not os.path.exists(f"{folder}/{name}") and time.monotonic() < until:
        time.sleep(0.02)


open(f"{folder}/{rank}", "w").close()
await_file(1 - rank)  # torch is read by both, however long that takes
with join_world(timeout_seconds=10.0) as world:
    if rank == 1 and case == "dies":
        os._exit(7)
    if rank == 1 and case == "slow":
        time.sleep(20.0)
    if rank == 1 and case == "quick":
        await_file("lost")
    gather = world.gather if case == "quick" else world.gather_slowly
    try:
        print(gather(rank * 10), flush=True)
    except RuntimeError:
        print("lost before the peer came", flush=True)
        open(f"{folder}/lost", "w").close()
"""


def outputs_of(case, folder):
    """What each of two processes prints."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with store_socket.open_listener(2) as listener:
        shared["MASTER_PORT"] = str(listener.getsockname()[1])
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, case, str(folder)],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **given},
                pass_fds=[int(descriptor) for descriptor in given.values()],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, given in enumerate([{store_socket.STORE_ENV: str(listener.fileno())}, {}])
        ]
    return [process.communicate(timeout=400)[0].strip() for process in processes]


def test_what_takes_long_on_one_process_is_waited_for(tmp_path):
    """Hashing a checkpoint's largest file may take longer than a collective operation of the training may."""
    assert outputs_of("slow", tmp_path) == ["[0, 10]", "[0, 10]"]


def test_training_does_not_wait_longer_than_its_timeout(tmp_path):
    assert outputs_of("quick", tmp_path)[0] == "lost before the peer came"


def test_a_peer_that_dies_is_noticed_at_once_also_by_who_is_patient(tmp_path):
    assert outputs_of("dies", tmp_path) == ["lost before the peer came", ""]


MEET = """
import os
from kftrain.errors import RetryableError
from kftrain.parallel.world import join_world

try:
    with join_world(timeout_seconds=60.0) as world:
        print(world.gather(os.environ["KFTRAIN_JOB"]), flush=True)
except RetryableError as error:
    print(error.line, flush=True)
"""


def start_rank(rank, job, port, **given):
    """A process of a job of two that meets the other one at a port of this machine."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", MEET],
        env={**os.environ, **place, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", store_socket.JOB_ENV: job, **given},
        pass_fds=[int(descriptor) for descriptor in given.values()],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_process_of_another_job_is_turned_away_and_disturbs_nobody():
    """Of two that train the same model each would else train for the other's run, and commit half of a checkpoint."""
    with store_socket.open_listener(2) as listener:
        port = listener.getsockname()[1]
        first = start_rank(0, "a", port, **{store_socket.STORE_ENV: str(listener.fileno())})
    stranger = start_rank(1, "b", port)
    assert "another job answers where the processes of this one meet" in stranger.communicate(timeout=200)[0]
    second = start_rank(1, "a", port)
    assert [one.communicate(timeout=200)[0].strip() for one in (first, second)] == ["['a', 'a']"] * 2


def test_a_port_that_another_job_has_costs_an_attempt_and_no_more():
    with store_socket.open_listener(2) as listener:
        first = start_rank(0, "a", listener.getsockname()[1])
        assert "processes cannot meet: The server socket has failed to listen" in first.communicate(timeout=200)[0]
