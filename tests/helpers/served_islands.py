"""Servers of a test, in the process of the first rank, through which islands exchange."""

import contextlib
import os
import tempfile
from pathlib import Path

from kftrain.core.credentials import SERVER_SECRET_VARIABLE
from kftrain.run.paths import RunPaths
from kftrain.server.process import RunServer

SECRET = "of a test"


@contextlib.contextmanager
def connect_islands(engine, resolved, world, before=None):
    """Lets the islands of an engine exchange through servers where its configuration has some. Collective."""
    if not resolved.server.num_servers:
        yield
        return
    with contextlib.ExitStack() as stack:
        folder = world.from_main(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = RunPaths.of(folder, "r")
        if world.is_main:
            start_servers(stack, paths, resolved)
        os.environ[SERVER_SECRET_VARIABLE] = SECRET
        engine.islands.connect(paths, world, before)
        stack.callback(engine.islands.close)
        yield


def start_servers(stack, paths, resolved):
    for number in range(resolved.server.num_servers):
        server = RunServer(
            paths, resolved, number, Path(stack.enter_context(tempfile.TemporaryDirectory())), SECRET.encode()
        )
        server.start()
        server.publish_address()
        stack.callback(server.stop)
