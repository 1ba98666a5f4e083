"""A function on several processes that form a world: forked, so that torch need not be imported again."""

import multiprocessing
import os
import socket

import torch

from kftrain.errors import KftrainError
from kftrain.parallel.world import join_world

JOIN_SECONDS = 30.0
FORK = multiprocessing.get_context("fork")


def on(size, function, *arguments):
    """`function(world, *arguments)` on each of `size` processes; what they return, or the line of the error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pipes = [FORK.Pipe(duplex=False) for _ in range(size)]
    processes = [
        FORK.Process(target=_run, args=(rank, size, port, pipes[rank][1], function, arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        return [receive.recv() if receive.poll(JOIN_SECONDS) else "no answer" for receive, _ in pipes]
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()


def _run(rank, size, port, pipe, function, arguments):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    try:
        with join_world(JOIN_SECONDS / 2) as world:
            try:
                answer = function(world, *arguments)
            except KftrainError as error:
                answer = f"{type(error).__name__}: {error.line}"
            pipe.send(answer)
            world.barrier()
            pipe.close()
            os._exit(0)  # what the parent has set up to run at its end is not the child's
    except (RuntimeError, OSError) as error:
        pipe.send(f"{type(error).__name__}: {error}")
