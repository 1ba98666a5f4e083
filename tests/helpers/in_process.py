"""A worker's training within the test's own process: one process, gloo, no torchrun."""

import contextlib
import random

import numpy as np
import torch

from kftrain.parallel.world import join_world
from kftrain.process import store_socket
from kftrain.process.stop_request import StopRequest
from kftrain.train import session


def train(paths, resolved, monkeypatch, stop=None):
    """Trains to the end, as a rank does."""
    with alone(monkeypatch):
        session.train(paths, resolved, stop or StopRequest())


@contextlib.contextmanager
def world(monkeypatch):
    """A world of one process."""
    with alone(monkeypatch), join_world(60.0) as joined:
        yield joined


@contextlib.contextmanager
def alone(monkeypatch):
    """The environment of the only rank of a job; torch's random state and threads are as before afterwards."""
    listener = store_socket.open_listener(1)
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    names |= {"MASTER_PORT": str(listener.getsockname()[1]), store_socket.STORE_ENV: str(listener.detach())}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        torch.set_num_threads(before[3])


class StopAfter(StopRequest):
    """Asks, before each step, to stop once so many have been taken."""

    def __init__(self, num_steps):
        self._num_left = num_steps + 1

    @property
    def requested(self):
        self._num_left -= 1
        return self._num_left <= 0
